"""Gives vLLM's own multi-modal path our processor and the true sizes of images."""

import math
from collections.abc import Mapping
from typing import Any

from vllm.model_executor.models.kimi_vl import (
    KimiVLDummyInputsBuilder,
    KimiVLMultiModalProcessor,
    KimiVLProcessingInfo,
)
from vllm.transformers_utils.repo_utils import get_non_weight_snapshot_path

from app.engine.kimi_vl.processor import KimiVLProcessor

__all__ = ["KimiVLDummyInputs", "KimiVLInfo", "KimiVLMultiModalProcessor"]


class KimiVLInfo(KimiVLProcessingInfo):  # type: ignore[misc]
    """What vLLM asks about a checkpoint's images, answered from ``preprocessor_config.json``."""

    def get_hf_processor(self, **_: Any) -> KimiVLProcessor:
        """Our processor, built once; patches come out in the model's data type."""
        processor: KimiVLProcessor | None = getattr(self, "_processor", None)
        if processor is None:
            config = self.ctx.model_config
            folder = get_non_weight_snapshot_path(config.model, revision=config.revision)
            processor = KimiVLProcessor.from_pretrained(folder, tokenizer=self.ctx.tokenizer, dtype=config.dtype)
            self._processor = processor
        return processor

    def get_num_image_tokens(self, *, image_width: int, image_height: int) -> int:
        """Raises:
        ImageSizeError: no plan exists for this size; vLLM's server answers 400.
        """
        return self.get_hf_processor().image_processor.geometry.plan(image_width, image_height).tokens


class KimiVLDummyInputs(KimiVLDummyInputsBuilder):  # type: ignore[misc]
    """The image that vLLM sizes its encoder cache by. vLLM's own is 1024x1024, while a checkpoint may allow more than
    three times as many tokens; such images were refused when ``max_num_batched_tokens`` was small."""

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Mapping[str, Any]) -> Any:
        geometry = self.info.get_hf_processor().image_processor.geometry
        (width, height), tokens = geometry.largest()
        if tokens > seq_len:  # no prompt can hold such an image
            side = math.isqrt(seq_len)
            width, height = side * geometry.block[0], side * geometry.block[1]
        images = self._get_dummy_images(
            width=width,
            height=height,
            num_images=mm_counts.get("image", 0),
            overrides=mm_options.get("image"),
        )
        return {"image": images}
