"""How a model takes images and prompts: the interface that Kimi-VL's fast path and vLLM's own processor share."""

from dataclasses import dataclass
from typing import Any, Protocol

from app.engine.kimi_vl.plugin import ARCHITECTURE
from app.engine.request import ClosedThinking, PreparedImage, Turn
from app.images.intake import DecodedImage


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as the engine takes it.

    Attributes:
        engine_input: vLLM's `EngineInput`.
        prompt_tokens: Tokens, images included.
        image_tokens: Tokens of each image, in order.
    """

    engine_input: Any
    prompt_tokens: int
    image_tokens: tuple[int, ...]


def prepared_image(image: DecodedImage, resized_to: tuple[int, int] | None, payload: Any) -> PreparedImage:
    """What every adapter keeps of a decoded image; the pixels themselves are let go."""
    return PreparedImage(
        id=image.id,
        width=image.pixels.width,
        height=image.pixels.height,
        format=image.format,
        frames=image.frames,
        resized_to=resized_to,
        payload=payload,
    )


class Adapter(Protocol):
    """What the engine needs to know of a model."""

    def check_size(self, width: int, height: int) -> None:
        """Refuse an image by its size in pixels, before it is decoded. Raises ImageTooLarge."""

    def prepare(self, image: DecodedImage) -> PreparedImage:
        """Make an image ready; runs in the image pool."""

    async def render(
        self, turns: tuple[Turn, ...], images: tuple[PreparedImage, ...], thinking: ClosedThinking | None
    ) -> Rendered:
        """Build the engine's input; `thinking` begins the model's own turn."""


def load_adapter(engine: Any, max_image_tokens: int | None) -> Adapter:
    """The adapter for the engine's model. Blocking: reads tokenizer and template."""
    config = engine.model_config
    if config.hf_config.architectures[0] == ARCHITECTURE:
        from vllm.transformers_utils.repo_utils import get_non_weight_snapshot_path

        from app.engine.kimi_vl.adapter import KimiVLAdapter

        # The folder itself, or where vLLM keeps the files of a model that was given by name.
        folder = get_non_weight_snapshot_path(config.model, revision=config.revision)
        return KimiVLAdapter(str(folder), config.dtype, max_image_tokens)
    from app.engine.generic import GenericAdapter

    return GenericAdapter(engine)
