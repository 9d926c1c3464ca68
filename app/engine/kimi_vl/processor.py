"""Kimi-VL's pixels: from a PIL image to the encoder's patches, and the processor that vLLM's own path asks for.

Equal, bit for bit, to the published ``image_processing_kimi_vl.py``: bicubic resize, black at the right and bottom,
``(x / 255 - mean) / std`` in float32, and patches in reading order. A pixel has 256 values, so the arithmetic is done
once for each pair of them and looked up after that.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from transformers import BatchFeature
from transformers.processing_utils import ProcessorMixin

from app.engine.kimi_vl.geometry import ImageGeometry, ImagePlan, ImageSizeError, ImageTooLarge, ImageTooSmall
from app.engine.kimi_vl.prompt import IMAGE_TOKEN
from app.engine.kimi_vl.tokenizer import KimiVLTokenizer, load_tokenizer

__all__ = [
    "ImageGeometry",
    "ImagePlan",
    "ImageSizeError",
    "ImageTooLarge",
    "ImageTooSmall",
    "KimiVLImageProcessor",
    "KimiVLProcessor",
    "patchify",
]


def patchify(
    image: Image.Image, geometry: ImageGeometry, plan: ImagePlan, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """The encoder's input for one image: ``(rows * columns, 3, patch_size, patch_size)``, normalised, on the CPU.

    Thread-safe, and one thread's work: NumPy and Pillow, which release the GIL in the long loops, so that a pool of
    threads is not multiplied by torch's own.

    Args:
        image: an RGB image of the size that ``plan`` was made for.
        plan: from :meth:`ImageGeometry.plan`.
        dtype: of the result; a narrower one is the float32 result rounded.

    Raises:
        ValueError: the image is not RGB.
    """
    if image.mode != "RGB":
        raise ValueError(f"expected an RGB image, not {image.mode}")
    if image.size != plan.resized:
        image = image.resize(plan.resized, Image.Resampling.BICUBIC)
    pixels = _pad_or_crop(np.asarray(image), plan)
    (rows, columns), size = plan.grid, geometry.patch_size
    table = _pair_table(geometry.image_mean, geometry.image_std, dtype)
    channel = np.arange(3)[:, None] * 65536
    values = np.empty((rows, columns, 3, size * size // 2), table.dtype)
    for row in range(rows):  # a row of patches at a time stays in the CPU's cache
        band = pixels[row * size : (row + 1) * size].reshape(size, columns, size, 3).transpose(1, 3, 0, 2)
        pairs = np.ascontiguousarray(band).reshape(columns, 3, size * size).view(np.uint16)
        np.take(table, pairs + channel, out=values[row], mode="clip")
    return torch.from_numpy(values.reshape(rows * columns, -1)).view(dtype).view(-1, 3, size, size)


def _pad_or_crop(pixels: npt.NDArray[np.uint8], plan: ImagePlan) -> npt.NDArray[np.uint8]:
    (width, height), (out_width, out_height) = plan.resized, plan.padded
    if (width, height) == (out_width, out_height):
        return pixels
    if out_width < width or out_height < height:
        # torchvision's center_crop rounds halves to even
        left, top = round((width - out_width) / 2), round((height - out_height) / 2)
        return pixels[top : top + out_height, left : left + out_width]
    canvas = np.zeros((out_height, out_width, 3), np.uint8)
    canvas[:height, :width] = pixels
    return canvas


@lru_cache(maxsize=16)
def _pair_table(mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype) -> npt.NDArray[Any]:
    """Normalised values of two neighbouring pixels at once: for each channel, for each of the 65,536 pairs of bytes
    as they lie in memory, the two values' bits in one integer. Shape (3 * 65536,)."""
    pairs = torch.from_numpy(np.arange(65536, dtype=np.uint16).view(np.uint8).reshape(65536, 2))
    levels = pairs.to(torch.float32).div(255).expand(3, 65536, 2)
    values = (levels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    integer = {2: torch.int32, 4: torch.int64}[dtype.itemsize]
    table: npt.NDArray[Any] = values.to(dtype).contiguous().view(integer).flatten().numpy()
    return table


class _ImageKwargs(TypedDict, total=False):
    in_token_limit: int


class KimiVLImageProcessor:
    """The image half of :class:`KimiVLProcessor`, with the attribute names that vLLM's ``kimi_vl.py`` reads."""

    model_input_names = ("pixel_values", "image_grid_hws")
    valid_kwargs = _ImageKwargs

    def __init__(self, geometry: ImageGeometry, dtype: torch.dtype = torch.float32) -> None:
        self.geometry = geometry
        self.dtype = dtype
        self.patch_size = geometry.patch_size
        self.merge_kernel_size = geometry.merge_kernel_size
        self.in_token_limit = geometry.in_token_limit

    def __call__(self, images: Any, **_: Any) -> BatchFeature:
        """``pixel_values`` (patches of all images, 3, size, size) and ``image_grid_hws`` (images, 2)."""
        if not isinstance(images, list | tuple):
            images = [images]
        patches, grids = [], []
        for image in images:
            rgb = (image if isinstance(image, Image.Image) else Image.fromarray(np.asarray(image))).convert("RGB")
            plan = self.geometry.plan(*rgb.size)
            patches.append(patchify(rgb, self.geometry, plan, self.dtype))
            grids.append(plan.grid)
        return BatchFeature({"pixel_values": torch.cat(patches), "image_grid_hws": torch.tensor(grids)})


class KimiVLProcessor(ProcessorMixin):  # type: ignore[misc]
    """The Hugging Face style processor: texts and images in, ``input_ids`` and patches out."""

    image_token = IMAGE_TOKEN

    def __init__(self, image_processor: KimiVLImageProcessor, tokenizer: KimiVLTokenizer) -> None:
        # ProcessorMixin's own constructor accepts only transformers' registered classes.
        self.image_processor = image_processor
        self.tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template
        self.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        tokenizer: KimiVLTokenizer | None = None,
        dtype: torch.dtype = torch.float32,
        **_: Any,
    ) -> "KimiVLProcessor":
        """Build it from a checkpoint folder; nothing in the folder is executed."""
        image_processor = KimiVLImageProcessor(ImageGeometry.from_folder(folder), dtype)
        return cls(image_processor, tokenizer or load_tokenizer(folder))

    def __call__(
        self, images: Any = None, text: str | Sequence[str] | None = None, return_tensors: str = "pt", **_: Any
    ) -> BatchFeature:
        """Each ``<|media_pad|>`` of the texts becomes as many as its image has tokens.

        Raises:
            ValueError: the texts do not have one ``<|media_pad|>`` for each image.
        """
        data = BatchFeature()
        counts: list[int] = []
        if images is not None and (not isinstance(images, list | tuple) or images):
            data.update(self.image_processor(images))
            rows, columns = self.image_processor.merge_kernel_size
            counts = [h * w // (rows * columns) for h, w in data["image_grid_hws"].tolist()]
        if text is not None:
            texts = [text] if isinstance(text, str) else list(text)
            if counts and sum(t.count(IMAGE_TOKEN) for t in texts) != len(counts):
                raise ValueError(f"{len(counts)} images need as many {IMAGE_TOKEN} in the text")
            if counts:
                remaining = iter(counts)
                texts = [_expand(t, remaining) for t in texts]
            data.update(self.tokenizer(texts, return_tensors=return_tensors))
        return data


def _expand(text: str, counts: Any) -> str:
    first, *rest = text.split(IMAGE_TOKEN)
    return first + "".join(IMAGE_TOKEN * next(counts) + part for part in rest)
