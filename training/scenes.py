"""Draws the pictures: coloured shapes on plain or noisy ground, and signs with a short word or number.

Everything random comes from one ``random.Random``, so a seed fixes a scene. Lengths are pixels.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from training.fonts import load_font

RGB = tuple[int, int, int]
COLORS: dict[str, RGB] = {
    "red": (215, 35, 40),
    "green": (40, 165, 60),
    "blue": (35, 75, 215),
    "yellow": (245, 220, 40),
    "orange": (240, 130, 20),
    "purple": (135, 50, 175),
    "pink": (250, 140, 190),
    "cyan": (50, 205, 220),
}
KINDS = ("circle", "square", "triangle", "star")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DIGITS = "0123456789"
CHARACTERS = LETTERS + DIGITS

SMALLEST_RADIUS = 11
# Few distinct sizes of type (pixels per em), so that loaded fonts stay in the cache: 18 to 260, 12% apart.
FONT_SIZES = tuple(round(18 * 1.12**i) for i in range(24))


@dataclass(frozen=True, slots=True)
class Shape:
    """A shape: kind, colour name, centre and radius."""

    kind: str
    color: str
    x: float
    y: float
    r: float

    @property
    def name(self) -> str:
        return f"{self.color} {self.kind}"


@dataclass(frozen=True, slots=True)
class Sign:
    """A sign: its text, the centre of each character, and its box (left, top, right, bottom)."""

    text: str
    centres: tuple[tuple[float, float], ...]
    box: tuple[float, float, float, float]


@dataclass(slots=True)
class Scene:
    """A picture and what is in it; shapes from left to right."""

    image: Image.Image
    shapes: list[Shape] = field(default_factory=list)
    sign: Sign | None = None


def _distance(a: Sequence[int], b: Sequence[int]) -> float:
    return math.dist(a, b)


def _jitter(rng: random.Random, color: RGB, amount: int = 14) -> RGB:
    r, g, b = (max(0, min(255, v + rng.randint(-amount, amount))) for v in color)
    return r, g, b


@cache
def _noise_tile() -> np.ndarray:
    """Normal noise (960, 960) with deviation 16, of which every picture takes a window."""
    return (np.random.default_rng(0).normal(0, 16, (960, 960))).astype(np.int16)


def _add_noise(rng: random.Random, image: Image.Image, deviation: float) -> Image.Image:
    pixels = np.asarray(image, np.int16)
    h, w = pixels.shape[:2]
    tile, (y, x) = _noise_tile(), (rng.randint(0, 960 - h), rng.randint(0, 960 - w))
    noise = tile[y : y + h, x : x + w] * int(deviation * 16) // 256
    return Image.fromarray((pixels + noise[..., None]).clip(0, 255).astype(np.uint8))


def _ground(rng: random.Random, size: tuple[int, int], avoid: Sequence[RGB], least: float = 90) -> Image.Image:
    """A background whose colour is far from the colours to avoid: plain, a gradient, or noisy."""
    for _ in range(40):
        t = rng.random()
        level = rng.randint(210, 255) if t < 0.45 else rng.randint(0, 60) if t < 0.7 else rng.randint(85, 185)
        tint = 10 if rng.random() < 0.6 else 45
        color = _jitter(rng, (level, level, level), tint)
        if all(_distance(color, other) > least for other in avoid):
            break
    else:
        color = (255, 255, 255) if rng.random() < 0.5 else (12, 12, 12)
    style = rng.random()
    if style < 0.6:
        return Image.new("RGB", size, color)
    if style < 0.8:  # a gradient along one side
        end, vertical = _jitter(rng, color, 28), rng.random() < 0.5
        ramp = np.linspace(color, end, size[1] if vertical else size[0]).astype(np.uint8)
        strip = Image.fromarray(ramp[:, None] if vertical else ramp[None])
        return strip.resize(size, Image.Resampling.NEAREST)
    return _add_noise(rng, Image.new("RGB", size, color), rng.uniform(2, 9))


def _outline(kind: str, x: float, y: float, r: float, turn: float) -> list[tuple[float, float]]:
    """Corners of a square, triangle or star, turned by an angle in radians."""
    if kind == "square":
        polar = [(r * 1.22, math.pi / 4 + i * math.pi / 2) for i in range(4)]
    elif kind == "triangle":
        polar = [(r * 1.15, i * 2 * math.pi / 3) for i in range(3)]
    else:
        polar = [(r * (1.1 if i % 2 == 0 else 0.45), i * math.pi / 5) for i in range(10)]
    return [(x + d * math.sin(a + turn), y - d * math.cos(a + turn)) for d, a in polar]


def _draw_shape(rng: random.Random, image: Image.Image, shape: Shape, color: RGB, smooth: bool) -> None:
    turn = rng.uniform(-0.3, 0.3) if rng.random() < 0.4 else 0.0
    scale = (4 if shape.r < 25 else 2 if shape.r < 70 else 1) if smooth else 1
    side = int(2.5 * shape.r) + 4
    left, top = int(shape.x) - side // 2, int(shape.y) - side // 2
    x, y, r = (shape.x - left) * scale, (shape.y - top) * scale, shape.r * scale
    mask = Image.new("L", (side * scale, side * scale), 0)
    draw = ImageDraw.Draw(mask)
    if shape.kind == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=255)
    else:
        draw.polygon(_outline(shape.kind, x, y, r, turn), fill=255)
    if scale > 1:
        mask = mask.reduce(scale)
    if rng.random() < 0.12 and shape.r > 14:  # a dark rim
        rim = mask.filter(ImageFilter.MaxFilter(3))
        image.paste((20, 20, 20) if rng.random() < 0.7 else (250, 250, 250), (left, top), rim)
    image.paste(color, (left, top), mask)


def _place_shapes(rng: random.Random, size: tuple[int, int], count: int, sign: Sign | None) -> list[Shape]:
    """Up to count shapes that touch neither each other, the sign, nor the border; from left to right."""
    w, h = size
    shorter = min(w, h)
    smallest = max(SMALLEST_RADIUS, 0.045 * shorter)
    largest = max(smallest + 3, shorter * (0.3 if count == 1 else 0.23 if count == 2 else 0.17))
    shapes: list[Shape] = []
    colors = [rng.choice(list(COLORS)) for _ in range(count)]
    if count > 1 and rng.random() < 0.3:
        colors[1] = colors[0]
    for color in colors:
        for attempt in range(40):
            r = math.exp(rng.uniform(math.log(smallest), math.log(largest))) * (1 if attempt < 25 else 0.7)
            r = max(r, smallest)
            reach = 1.2 * r + 2
            if 2 * reach >= shorter:
                continue
            x, y = rng.uniform(reach, w - reach), rng.uniform(reach, h - reach)
            if sign and not (
                x + reach < sign.box[0] or x - reach > sign.box[2] or y + reach < sign.box[1] or y - reach > sign.box[3]
            ):
                continue
            if all(math.hypot(x - o.x, y - o.y) > 1.1 * (r + o.r) + 3 for o in shapes):
                shapes.append(Shape(rng.choice(KINDS), color, x, y, r))
                break
    return sorted(shapes, key=lambda s: s.x)


INKS: tuple[RGB, ...] = ((0, 0, 0), (255, 255, 255), (20, 30, 120), (160, 20, 20), (255, 230, 80), (10, 80, 40))


def _draw_sign(
    rng: random.Random, image: Image.Image, text: str, fonts: Sequence[str], board: bool, room: float
) -> Sign:
    """Print the text, perhaps on a board and slightly turned, somewhere in the picture."""
    w, h = image.size
    path = rng.choice(fonts)
    probe = load_font(path, 100)
    left, top, right, bottom = probe.getbbox(text)
    largest = min(room * (w - 8) * 100 / (right - left), 0.8 * room * (h - 8) * 100 / (bottom - top))
    size = rng.choice([v for v in FONT_SIZES if v <= largest] or [max(12, int(largest))])
    font = load_font(path, size)
    gap = rng.uniform(0, 0.2) * size if rng.random() < 0.2 and size < 0.75 * largest else 0.0
    left, top, right, bottom = (int(v) for v in font.getbbox(text))
    ends = [font.getlength(text[: i + 1]) for i in range(len(text))]
    centres = [(a + b) / 2 + i * gap for i, (a, b) in enumerate(zip([0.0, *ends[:-1]], ends, strict=True))]
    tw, th = int(right - left + gap * (len(text) - 1)) + 4, bottom - top + 4
    mask = Image.new("L", (tw, th), 0)
    draw = ImageDraw.Draw(mask)
    if gap:
        starts = [0.0, *ends[:-1]]
        for i, character in enumerate(text):
            draw.text((2 - left + starts[i] + i * gap, 2 - top), character, fill=255, font=font)
    else:
        draw.text((2 - left, 2 - top), text, fill=255, font=font)
    points = [(2 - left + x - tw / 2, 0.0) for x in centres]
    if rng.random() < 0.3:
        degrees = rng.uniform(-7, 7)
        mask = mask.rotate(degrees, Image.Resampling.BILINEAR, expand=True)
        cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
        points = [(x * cos, -x * sin) for x, _ in points]
    tw, th = mask.size
    x, y = rng.randint(1, max(1, w - tw - 2)), rng.randint(1, max(1, h - th - 2))
    if board:
        ink = rng.choice(INKS)
        paint = next((c for c in (_random_color(rng) for _ in range(60)) if _distance(c, ink) > 180), None)
        paint = paint or ((255, 255, 255) if sum(ink) < 380 else (0, 0, 0))
        px, py = rng.randint(2, 6 + size // 4), rng.randint(2, 6 + size // 4)
        box = (x - px, y - py, x + tw + px, y + th + py)
        canvas = ImageDraw.Draw(image)
        if rng.random() < 0.3:
            canvas.rounded_rectangle(box, radius=min(px, py) + 2, fill=paint)
        else:
            rim = ink if rng.random() < 0.25 else None
            canvas.rectangle(box, fill=paint, outline=rim, width=rng.randint(1, 3))
    else:
        box = (x, y, x + tw, y + th)
        under = image.getpixel((min(w - 1, x + tw // 2), min(h - 1, y + th // 2)))
        inks = [c for c in INKS if _distance(c, under) > 150]  # type: ignore[arg-type]
        ink = rng.choice(inks) if inks else (255, 255, 255)
    image.paste(ink, (x, y), mask)
    return Sign(text, tuple((x + tw / 2 + a, y + th / 2 + b) for a, b in points), box)


def _random_color(rng: random.Random) -> RGB:
    return rng.randint(0, 255), rng.randint(0, 255), rng.randint(0, 255)


def _weather(rng: random.Random, image: Image.Image, small_text: bool) -> Image.Image:
    """What cameras and files do to a picture: blur, contrast, noise, JPEG."""
    if rng.random() < 0.15:
        image = image.filter(ImageFilter.BoxBlur(rng.uniform(0.2, 0.5 if small_text else 1.0)))
    if rng.random() < 0.15:
        gain, shift = rng.uniform(0.75, 1.1), rng.uniform(-12, 25)
        image = image.point([max(0, min(255, int(v * gain + shift))) for v in range(256)] * 3)
    if rng.random() < 0.15:
        image = _add_noise(rng, image, rng.uniform(1.5, 7))
    if rng.random() < 0.12:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=rng.randint(55, 95))
        image = Image.open(file).convert("RGB")
    return image


def draw_scene(
    rng: random.Random,
    size: tuple[int, int],
    *,
    shapes: int = 0,
    text: str | None = None,
    fonts: Sequence[str] = (),
    plain: bool = False,
) -> Scene:
    """A picture of size (width, height) with so many shapes (fewer where they do not fit) and perhaps a sign.

    ``plain`` leaves blur, noise and JPEG out.
    """
    sign = None
    if text is None:
        placed = _place_shapes(rng, size, shapes, None)
        base = _ground(rng, size, [COLORS[s.color] for s in placed])
    else:
        base = _ground(rng, size, [])
        sign = _draw_sign(rng, base, text, fonts, board=rng.random() < 0.65, room=0.96 if not shapes else 0.7)
        ground = base.getpixel((1, 1))
        placed = [s for s in _place_shapes(rng, size, shapes, sign) if _distance(COLORS[s.color], ground) > 90]  # type: ignore[arg-type]
    smooth = rng.random() < 0.7
    for shape in placed:
        _draw_shape(rng, base, shape, _jitter(rng, COLORS[shape.color]), smooth)
    if not plain:
        small = sign is not None and (sign.box[3] - sign.box[1]) < 40
        base = _weather(rng, base, small)
    return Scene(base, placed, sign)
