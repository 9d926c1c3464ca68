"""Kimi-VL behind the engine's interface: exact geometry, patches from the image pool, prompts that cannot be broken."""

import asyncio
from functools import partial

import torch

from app.engine.adapter import Rendered, prepared_image
from app.engine.kimi_vl.geometry import ImageGeometry, ImagePlan, ImageSizeError, ImageTooSmall
from app.engine.kimi_vl.inputs import engine_input, image_hash
from app.engine.kimi_vl.processor import patchify
from app.engine.kimi_vl.prompt import PromptBuilder, PromptError
from app.engine.kimi_vl.tokenizer import load_tokenizer
from app.engine.request import ClosedThinking, PreparedImage, Turn
from app.errors import ImageTooLarge, InvalidField
from app.images.intake import DecodedImage

LONG_TEXT = 20_000  # characters


class KimiVLAdapter:
    """Everything that the fast path needs from a checkpoint folder.

    Args:
        folder: The checkpoint.
        dtype: Of the patches; the engine's own spares it a conversion.
        max_image_tokens: Bound on the tokens of an image, below the checkpoint's own.
    """

    def __init__(self, folder: str, dtype: torch.dtype, max_image_tokens: int | None) -> None:
        self._geometry = ImageGeometry.from_folder(folder)
        self._prompts = PromptBuilder(load_tokenizer(folder))
        self._dtype = dtype
        self._max_image_tokens = max_image_tokens

    def check_size(self, width: int, height: int) -> None:
        self._plan(width, height)

    def prepare(self, image: DecodedImage) -> PreparedImage:
        plan = self._plan(*image.pixels.size)
        patches = patchify(image.pixels, self._geometry, plan, self._dtype)
        return prepared_image(image, plan.resized, (plan, patches))

    async def render(
        self, turns: tuple[Turn, ...], images: tuple[PreparedImage, ...], thinking: ClosedThinking | None
    ) -> Rendered:
        plans = [image.payload[0] for image in images]
        try:
            build = partial(self._prompts.build, turns, [plan.tokens for plan in plans], thinking)
            # A megabyte of text takes half a second to encode; a question takes microseconds.
            long = sum(len(turn.text) for turn in turns) > LONG_TEXT
            prompt = await asyncio.to_thread(build) if long else build()
        except PromptError as error:
            raise InvalidField(str(error), field="history") from error
        return Rendered(
            engine_input(
                prompt,
                [image.payload[1] for image in images],
                [plan.grid for plan in plans],
                [image_hash(image.id, plan) for image, plan in zip(images, plans, strict=True)],
            ),
            len(prompt.token_ids),
            tuple(plan.tokens for plan in plans),
        )

    def _plan(self, width: int, height: int) -> ImagePlan:
        try:
            return self._geometry.plan(width, height, self._max_image_tokens)
        except ImageTooSmall as error:
            raise InvalidField(str(error), field="image") from error
        except ImageSizeError as error:
            raise ImageTooLarge(str(error), field="image", limit=self._geometry.max_side) from error
