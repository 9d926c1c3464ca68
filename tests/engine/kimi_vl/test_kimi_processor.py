"""Patches equal the published image_processing_kimi_vl.py bit for bit, and plans know them before any pixel is read."""

import json
import math
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from app.engine.kimi_vl.geometry import ImageGeometry, ImageTooLarge, ImageTooSmall
from app.engine.kimi_vl.processor import KimiVLProcessor, patchify
from app.engine.kimi_vl.tokenizer import KimiVLTokenizer

THINKING_2506 = ImageGeometry(in_token_limit=16384, pad_input=True, image_mean=(0.5,) * 3, image_std=(0.5,) * 3)
SMALL = ImageGeometry(in_token_limit=64, pad_input=True, image_mean=(0.5,) * 3, image_std=(0.5,) * 3)
CLIP = ImageGeometry(in_token_limit=64, pad_input=True)
CROPPING = ImageGeometry(in_token_limit=64, pad_input=False)
ALL = [THINKING_2506, SMALL, CLIP, CROPPING]


def published(image: Image.Image, geometry: ImageGeometry) -> tuple[torch.Tensor, tuple[int, int]]:
    """The published arithmetic step by step; torchvision's pad, center_crop, to_tensor and normalize spelled out."""
    p, (kh, kw) = geometry.patch_size, geometry.merge_kernel_size
    w, h = image.size
    if (w // p) * (h // p) > geometry.in_token_limit:
        scale = math.sqrt(geometry.in_token_limit / ((w // p) * (h // p)))
        image = image.resize((int(w * scale), int(h * scale)), Image.Resampling.BICUBIC)
    w, h = image.size
    if geometry.pad_input:
        padded = Image.new("RGB", (w + (kw * p - w % (kw * p)) % (kw * p), h + (kh * p - h % (kh * p)) % (kh * p)))
        padded.paste(image, (0, 0))
        image = padded
    else:
        new_w, new_h = w - w % p, h - h % p
        left, top = round((w - new_w) / 2.0), round((h - new_h) / 2.0)
        image = image.crop((left, top, left + new_w, top + new_h))
    x = torch.from_numpy(np.array(image)).permute(2, 0, 1).to(torch.float32).div(255)
    x = x.sub(torch.tensor(geometry.image_mean)[:, None, None]).div(torch.tensor(geometry.image_std)[:, None, None])
    c, height, width = x.shape
    x = x.reshape(c, height // p, p, width // p, p).permute(1, 3, 0, 2, 4).contiguous().view(-1, c, p, p)
    return x, (height // p, width // p)


def noise(width: int, height: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("seed", range(500))
def test_patches_equal_the_published_ones_bit_for_bit(seed: int) -> None:
    rng = random.Random(seed)
    geometry = ALL[seed % 4]
    side = lambda: rng.choice((rng.randint(1, 30), rng.randint(1, 300), rng.randint(250, 500)))  # noqa: E731
    image = noise(side(), side(), seed)
    try:
        plan = geometry.plan(*image.size)
    except ImageTooSmall:
        assert not geometry.pad_input
        assert min(image.size) < 28 or max(image.size) / min(image.size) > 4
        return
    expected, grid = published(image, geometry)
    if grid[0] % 2 or grid[1] % 2:
        assert not geometry.pad_input  # the published code makes odd grids here, and its own encoder fails on them
        return
    assert plan.grid == grid
    assert plan.tokens == grid[0] * grid[1] // 4
    patches = patchify(image, geometry, plan, torch.float32)
    assert patches.shape == expected.shape
    assert torch.equal(patches.view(torch.int32), expected.view(torch.int32))
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(patchify(image, geometry, plan, dtype), expected.to(dtype))


def test_threads_give_the_same_patches() -> None:
    images = [noise(300 + n, 200 + 3 * n, n) for n in range(24)]
    plans = [SMALL.plan(*image.size) for image in images]
    alone = [patchify(image, SMALL, plan) for image, plan in zip(images, plans, strict=True)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda i, p: patchify(i, SMALL, p), images, plans))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_only_rgb_is_taken() -> None:
    with pytest.raises(ValueError, match="RGB"):
        patchify(Image.new("RGBA", (28, 28)), SMALL, SMALL.plan(28, 28))


@pytest.mark.parametrize(
    ("size", "resized", "padded", "grid", "tokens"),
    [
        ((1, 1), (1, 1), (28, 28), (2, 2), 1),
        ((448, 448), (448, 448), (448, 448), (32, 32), 256),
        ((1024, 1024), (1024, 1024), (1036, 1036), (74, 74), 1369),
        ((4000, 3000), (2073, 1554), (2100, 1568), (112, 150), 4200),
        ((1, 7140), (1, 7140), (28, 7140), (510, 2), 255),
    ],
)
def test_plans_of_known_sizes(
    size: tuple[int, int], resized: tuple[int, int], padded: tuple[int, int], grid: tuple[int, int], tokens: int
) -> None:
    plan = THINKING_2506.plan(*size)
    assert (plan.resized, plan.padded, plan.grid, plan.tokens) == (resized, padded, grid, tokens)


@pytest.mark.parametrize("size", [(7141, 14), (1, 7168), (60_000, 30), (10, 10_000_000)])
def test_a_side_of_512_patches_is_too_large(size: tuple[int, int]) -> None:
    with pytest.raises(ImageTooLarge, match="7140 pixels"):
        THINKING_2506.plan(*size)


def test_a_crop_to_nothing_is_too_small() -> None:
    with pytest.raises(ImageTooSmall):
        CROPPING.plan(27, 100)


def test_a_thin_image_keeps_a_pixel_of_its_short_side() -> None:
    plan = THINKING_2506.plan(14, 7140, max_tokens=1)
    assert plan.resized[0] == 1
    assert plan.tokens == 1
    assert patchify(noise(14, 7140, 0), THINKING_2506, plan).shape == (4, 3, 14, 14)


@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 6000))
def test_max_tokens_is_never_passed_and_changes_nothing_that_fits(width: int, height: int, most: int) -> None:
    plan = THINKING_2506.plan(width, height, most) if max(width, height) < 7000 else None
    if plan is None:
        return
    assert plan.tokens <= most
    free = THINKING_2506.plan(width, height)
    if free.tokens <= most and most >= 4096:
        assert plan == free
    if free.tokens > most > 64 and max(width, height) < 3 * min(width, height):
        assert plan.tokens > most * 0.75  # not needlessly small


def test_max_tokens_does_not_raise_the_checkpoints_limit() -> None:
    assert THINKING_2506.plan(4000, 3000, max_tokens=6000) == THINKING_2506.plan(4000, 3000)


def test_cropping_leaves_whole_blocks_of_two_by_two_patches() -> None:
    plan = CROPPING.plan(70, 60)
    assert (plan.padded, plan.grid, plan.tokens) == ((56, 56), (4, 4), 4)


@pytest.mark.parametrize("arguments", [(0, 5), (5, 0), (5, 5, 0)])
def test_a_plan_needs_positive_numbers(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SMALL.plan(*arguments)


@pytest.mark.parametrize("geometry", ALL)
def test_no_image_takes_more_tokens_than_the_largest(geometry: ImageGeometry) -> None:
    size, tokens = geometry.largest()
    assert geometry.plan(*size).tokens == tokens
    rng = random.Random(5)
    for _ in range(50_000):
        width = rng.randint(1, 1500)
        try:
            assert geometry.plan(width, rng.randint(1, 8000)).tokens <= tokens
        except (ImageTooLarge, ImageTooSmall):
            continue


def test_the_checkpoints_own_file_is_read(model_dir: Path) -> None:
    config = json.loads((model_dir / "preprocessor_config.json").read_text())
    geometry = ImageGeometry.from_folder(model_dir)
    assert geometry.in_token_limit == config["in_token_limit"]
    assert geometry.image_mean == tuple(config["image_mean"])
    assert geometry.pad_input is config["pad_input"]


@pytest.mark.parametrize(
    "broken",
    [
        {"image_mean": 1},
        {"image_std": [0.5, 0.5]},
        {"image_std": [0.5, 0.5, 0]},
        {"patch_size": 7},
        {"patch_size": "14"},
        {"in_token_limit": 0},
        {"merge_kernel_size": [2]},
    ],
)
def test_a_broken_file_is_named(broken: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"preprocessor_config\.json"):
        ImageGeometry.from_config({"pad_input": True} | broken)


def test_the_processor_gives_the_same_patches_and_as_many_tokens(
    model_dir: Path, demo_tokenizer: KimiVLTokenizer
) -> None:
    processor = KimiVLProcessor.from_pretrained(model_dir, tokenizer=demo_tokenizer)
    geometry = processor.image_processor.geometry
    images = [noise(100, 60, 1), noise(300, 500, 2)]
    plans = [geometry.plan(*image.size) for image in images]
    output = processor(images=images, text="a<|media_pad|>b<|media_pad|>", return_tensors="pt", truncation=False)
    expected = torch.cat([patchify(i, geometry, p, torch.float32) for i, p in zip(images, plans, strict=True)])
    assert torch.equal(output["pixel_values"], expected)
    assert output["image_grid_hws"].tolist() == [list(plan.grid) for plan in plans]
    pads = (output["input_ids"] == processor.image_token_id).sum().item()
    assert pads == sum(plan.tokens for plan in plans)
    with pytest.raises(ValueError, match="2 images"):
        processor(images=images, text="<|media_pad|>")
    assert torch.equal(processor(images=np.asarray(images[0]))["pixel_values"], expected[: 2 * plans[0].tokens * 2])
