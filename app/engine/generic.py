"""Any vision model that vLLM knows, through vLLM's own chat template and processor."""

from functools import partial
from typing import Any

from app.engine.adapter import Rendered, prepared_image
from app.engine.request import ClosedThinking, PreparedImage, Turn
from app.errors import InvalidField
from app.images.intake import DecodedImage


class GenericAdapter:
    """Renders with the engine's own renderer, whose thread does the image work.

    vLLM encodes the template together with what users wrote, so special tokens that a user types are special here.

    Args:
        engine: vLLM's `AsyncLLMEngine`.
    """

    def __init__(self, engine: Any) -> None:
        self._renderer = engine.renderer

    def check_size(self, width: int, height: int) -> None:
        """vLLM's processor scales images down by itself."""

    def prepare(self, image: DecodedImage) -> PreparedImage:
        return prepared_image(image, None, image.pixels)

    async def render(
        self, turns: tuple[Turn, ...], images: tuple[PreparedImage, ...], thinking: ClosedThinking | None
    ) -> Rendered:
        from vllm.exceptions import VLLMClientError
        from vllm.renderers import ChatParams

        params = ChatParams(chat_template_kwargs={"add_generation_prompt": True})
        try:
            _, (engine_input,) = await self._renderer.render_chat_async([_messages(turns, images)], params)
        except (VLLMClientError, ValueError) as error:
            raise InvalidField(str(error)) from error
        if thinking is not None:
            encode = partial(self._renderer.get_tokenizer().encode, add_special_tokens=False)
            ids = encode(thinking.open) + encode(thinking.text, split_special_tokens=True) + encode(thinking.close)
            engine_input["prompt_token_ids"] += ids
        placeholders = engine_input.get("mm_placeholders", {}).get("image", ())
        return Rendered(
            engine_input,
            len(engine_input["prompt_token_ids"]),
            tuple(placeholder.length for placeholder in placeholders),
        )


def _messages(turns: tuple[Turn, ...], images: tuple[PreparedImage, ...]) -> list[dict[str, Any]]:
    """OpenAI-style messages with vLLM's `image_pil` parts, which name the image by its content hash."""
    remaining = iter(images)
    messages: list[dict[str, Any]] = []
    for turn in turns:
        parts: list[dict[str, Any]] = []
        for _ in range(turn.images):
            image = next(remaining)
            parts.append({"type": "image_pil", "image_pil": image.payload, "uuid": image.id})
        messages.append({"role": turn.role, "content": [*parts, {"type": "text", "text": turn.text}]})
    return messages
