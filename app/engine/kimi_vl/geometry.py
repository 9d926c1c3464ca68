"""Sizes of Kimi-VL images: what an image of a given width and height becomes, without touching a pixel.

Facts taken from the published ``image_processing_kimi_vl.py`` and ``preprocessor_config.json``: an image of more than
``in_token_limit`` patches is scaled down, then padded to whole blocks of ``merge_kernel_size`` patches (or cut to them,
when ``pad_input`` is false); each block becomes one token; MoonViT's position table ends at 512 patches a side.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAX_SIDE_PATCHES = 512
"""First number of patches on a side that the encoder cannot place."""

Size = tuple[int, int]


class ImageSizeError(ValueError):
    """No plan exists for an image of this size."""


class ImageTooLarge(ImageSizeError):
    """A side has 512 patches or more after scaling."""


class ImageTooSmall(ImageSizeError):
    """Cropping to whole blocks would leave nothing. Only checkpoints with ``pad_input`` false have this limit."""


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """What becomes of one image. ``resized`` and ``padded`` are (width, height) in pixels, ``grid`` is (rows, columns)
    in patches, ``tokens`` the number of image tokens in the prompt."""

    resized: Size
    padded: Size
    grid: tuple[int, int]
    tokens: int


@dataclass(frozen=True, slots=True)
class ImageGeometry:
    """A checkpoint's image settings; see :meth:`from_folder`. Values and defaults are the published class's."""

    patch_size: int = 14
    merge_kernel_size: tuple[int, int] = (2, 2)
    in_token_limit: int = 4096
    pad_input: bool = False
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ImageGeometry":
        """Read the settings out of ``preprocessor_config.json``'s content; other keys are ignored.

        Raises:
            ValueError: a setting has a wrong type or makes no sense.
        """
        try:
            known = {name: config[name] for name in cls.__dataclass_fields__ if config.get(name) is not None}
            for name in ("merge_kernel_size", "image_mean", "image_std"):
                if name in known:
                    known[name] = tuple(known[name])
            geometry = cls(**known)
            plan = geometry.plan(*geometry.block)
            if plan.tokens < 1 or geometry.patch_size % 2 or geometry.in_token_limit < 1:
                raise ValueError("patch_size must be even, in_token_limit and merge_kernel_size positive")
            if len(geometry.image_mean) != 3 or len(geometry.image_std) != 3 or not all(geometry.image_std):
                raise ValueError("not three means and three standard deviations other than 0")
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ValueError(f"preprocessor_config.json: {error}") from error
        return geometry

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ImageGeometry":
        """Read ``preprocessor_config.json``.

        Raises:
            FileNotFoundError: the folder has none.
            ValueError: it cannot be understood.
        """
        return cls.from_config(json.loads((Path(folder) / "preprocessor_config.json").read_text(encoding="utf-8")))

    @property
    def max_side(self) -> int:
        """Longest side in pixels, after scaling."""
        most = MAX_SIDE_PATCHES - 1
        return min(most - most % count for count in self.merge_kernel_size) * self.patch_size

    @property
    def block(self) -> Size:
        """Width and height in pixels of the block that becomes one token."""
        rows, columns = self.merge_kernel_size
        return columns * self.patch_size, rows * self.patch_size

    def plan(self, width: int, height: int, max_tokens: int | None = None) -> ImagePlan:
        """Plan an image of this size in pixels.

        Without ``max_tokens`` this is the published arithmetic, which counts whole patches before padding and so can
        end a little above ``in_token_limit``. With it, an image whose plan has more tokens is scaled down until it
        has no more than ``max_tokens`` (which never raises the checkpoint's own limit).

        Raises:
            ImageTooLarge: a side has 512 patches or more after scaling.
            ImageTooSmall: cropping would leave nothing.
            ValueError: a size or ``max_tokens`` below 1.
        """
        if min(width, height) < 1 or (max_tokens is not None and max_tokens < 1):
            raise ValueError("width, height and max_tokens must be at least 1")
        limit = self.in_token_limit
        if max_tokens is not None:
            limit = min(limit, max_tokens * self.merge_kernel_size[0] * self.merge_kernel_size[1])
        patches = (width // self.patch_size) * (height // self.patch_size)
        scale = math.sqrt(limit / patches) if patches > limit else 1.0
        plan = self._scaled(width, height, scale)
        while max_tokens is not None and plan.tokens > max_tokens:
            scale *= min(0.99, math.sqrt(max_tokens / plan.tokens))
            plan = self._scaled(width, height, scale)
        if max(plan.grid) >= MAX_SIDE_PATCHES:
            raise ImageTooLarge(
                f"{width}x{height} pixels become {plan.grid[1]}x{plan.grid[0]} patches, more than the model places; "
                f"a side takes at most {self.max_side} pixels"
            )
        if plan.tokens < 1:
            raise ImageTooSmall(f"{width}x{height} pixels are less than one block of {self.block[0]}x{self.block[1]}")
        return plan

    def largest(self) -> tuple[Size, int]:
        """An image size (width, height) that takes the most tokens any image can, and that number of tokens.

        That is more than ``in_token_limit`` allows for: a thin image whose sides end just below a whole patch gains
        most from the padding. Found by trying all heights for each number of whole patches across.
        """
        best: tuple[Size, int] = (self.block, 1)
        round_ = np.ceil if self.pad_input else np.floor
        heights = np.arange(1, (MAX_SIDE_PATCHES + 32) * self.patch_size)
        for columns in range(1, MAX_SIDE_PATCHES):
            width = (columns + 1) * self.patch_size - 1
            patches = columns * (heights // self.patch_size)
            scale = np.sqrt(self.in_token_limit / np.maximum(patches, self.in_token_limit))
            across = round_(np.maximum(1, (width * scale).astype(int)) / self.block[0])
            down = round_(np.maximum(1, (heights * scale).astype(int)) / self.block[1])
            fits = np.maximum(across * self.merge_kernel_size[1], down * self.merge_kernel_size[0]) < MAX_SIDE_PATCHES
            tokens = across * down * fits
            if tokens.max() > best[1]:
                best = ((width, int(heights[tokens.argmax()])), int(tokens.max()))
        return best

    def _scaled(self, width: int, height: int, scale: float) -> ImagePlan:
        if scale != 1.0:
            # A very thin image would lose its short side, where the published code fails in the resize.
            width, height = max(1, int(width * scale)), max(1, int(height * scale))
        across, down = self.block
        if self.pad_input:
            padded = width + -width % across, height + -height % down
        else:
            # The published code cuts to whole patches; where that leaves half a block, its own encoder fails.
            padded = width - width % across, height - height % down
        grid = padded[1] // self.patch_size, padded[0] // self.patch_size
        return ImagePlan((width, height), padded, grid, (padded[0] // across) * (padded[1] // down))
