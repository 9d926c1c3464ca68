"""vLLM's Kimi-VL, with what depends only on an image's grid computed once per grid.

In vLLM 0.32 MoonViT interpolates its position table for every image (bicubic; 8.3 ms of the 42 ms of GPU time of a
1024x1024 image on an H200), and its encoder asks the GPU for the longest sequence in every layer, each time a
synchronisation. vLLM already has ``prepare_encoder_metadata``, which answers all of that on the CPU, but uses it for
CUDA graphs only. Here every forward pass uses it, and its costly parts are kept.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.kimi_vl import KimiVLForConditionalGeneration
from vllm.model_executor.models.moonvit import Learnable2DInterpPosEmb, MoonVitPretrainedModel, Rope2DPosEmb
from vllm.multimodal import MULTIMODAL_REGISTRY

from app.engine.kimi_vl.processing import KimiVLDummyInputs, KimiVLInfo, KimiVLMultiModalProcessor

Grid = tuple[int, int]

MAX_BYTES = 256 * 1024 * 1024
"""Device memory of one cache: 20 grids of 1024x1024 pixels at MoonViT's published width in bfloat16."""


class GridCache:
    """Tensors by (rows, columns) grid; the least recently used go first. Holds at least the newest."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._tensors: OrderedDict[Grid, torch.Tensor] = OrderedDict()
        self._bytes = 0
        self.misses = 0

    def get(self, grid: Grid, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The tensor of this grid. Callers must not write to it."""
        found = self._tensors.get(grid)
        if found is not None:
            self._tensors.move_to_end(grid)
            return found
        self.misses += 1
        made = self._tensors[grid] = make()
        self._bytes += made.nbytes
        while self._bytes > self._max_bytes and len(self._tensors) > 1:
            self._bytes -= self._tensors.popitem(last=False)[1].nbytes
        return made

    def clear(self) -> None:
        self._tensors.clear()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._tensors)


class CachedPosEmb(Learnable2DInterpPosEmb):  # type: ignore[misc]
    """The learned position table, interpolated once per grid."""

    grids: GridCache

    def get_pos_embeds(self, grid_hws_list: Any) -> torch.Tensor:
        """Packed position embeddings, ``(sum(rows * columns), dim)``; a new tensor each time."""
        interpolate = super().get_pos_embeds
        parts = [self.grids.get(grid, partial(interpolate, [grid])) for grid in _pairs(grid_hws_list)]
        return torch.cat(parts or [interpolate([])])


class CachedRope(Rope2DPosEmb):  # type: ignore[misc]
    """The rotary angles, cut out of their table once per grid."""

    grids: GridCache

    def get_freqs_cis_by_seqlens_list(self, grid_hws_list: Any) -> torch.Tensor:
        """Packed angles, ``(sum(rows * columns), dim / 2)`` complex; a new tensor each time."""
        cut_out = super().get_freqs_cis_by_seqlens_list
        parts = [self.grids.get(grid, partial(cut_out, [grid])) for grid in _pairs(grid_hws_list)]
        return torch.cat(parts or [cut_out([])])


class CachedMoonViT(MoonVitPretrainedModel):  # type: ignore[misc]
    """MoonViT that always prepares its metadata on the CPU."""

    @classmethod
    def take_over(cls, tower: MoonVitPretrainedModel) -> "CachedMoonViT":
        """Turn a tower, with its weights, into this class: it only adds methods and two caches."""
        tower.__class__ = cls
        tower.patch_embed.pos_emb.__class__ = CachedPosEmb
        tower.patch_embed.pos_emb.grids = GridCache()
        tower.encoder.rope_2d.__class__ = CachedRope
        tower.encoder.rope_2d.grids = GridCache()
        return tower  # type: ignore[no-any-return]

    def forget(self) -> None:
        """Drop what was computed from the weights; they have changed."""
        self.patch_embed.pos_emb.grids.clear()

    def forward(
        self, pixel_values: torch.Tensor, grid_hw: Any, *, encoder_metadata: dict[str, Any] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        """As vLLM's: one tensor of all images with ``encoder_metadata`` (CUDA graphs), without it one for each.

        Args:
            pixel_values: patches of all images, ``(sum(rows * columns), 3, 14, 14)``.
            grid_hw: ``(images, 2)`` rows and columns, in CPU memory.
            encoder_metadata: from ``prepare_encoder_metadata``.
        """
        if encoder_metadata is not None:
            return super().forward(pixel_values, grid_hw, encoder_metadata=encoder_metadata)  # type: ignore[no-any-return]
        grids = _pairs(grid_hw)
        metadata = self.prepare_encoder_metadata(grids, device=pixel_values.device)
        packed = super().forward(pixel_values, None, encoder_metadata=metadata)
        rows, columns = self.merge_kernel_size
        return list(packed.split([(h // rows) * (w // columns) for h, w in grids]))


@MULTIMODAL_REGISTRY.register_processor(KimiVLMultiModalProcessor, info=KimiVLInfo, dummy_inputs=KimiVLDummyInputs)  # type: ignore[untyped-decorator, unused-ignore]
class KimiVLWithCaches(KimiVLForConditionalGeneration):  # type: ignore[misc]
    """Registered under the architecture name of the published checkpoints."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        CachedMoonViT.take_over(self.vision_tower)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Also called when weights are replaced in a running engine."""
        self.vision_tower.forget()
        loaded: set[str] = super().load_weights(weights)
        return loaded


def _pairs(grids: Any) -> list[Grid]:
    pairs = grids.tolist() if isinstance(grids, torch.Tensor) else grids
    return [(int(rows), int(columns)) for rows, columns in pairs]
