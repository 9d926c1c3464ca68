"""Draws the two example pictures of demo_model/examples: a sign and three shapes, in Pillow's built-in, held-out font.

python -m training.examples demo_model/examples
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

SCALE = 4  # drawn larger and reduced, for smooth edges


def sign() -> Image.Image:
    """A shop sign that says OPEN, 320x200 px."""
    image = Image.new("RGB", (320 * SCALE, 200 * SCALE), (226, 232, 240))
    draw = ImageDraw.Draw(image)
    draw.rounded_rectangle([v * SCALE for v in (40, 50, 280, 150)], 14 * SCALE, fill=(20, 60, 130))
    draw.text(
        (160 * SCALE, 100 * SCALE), "OPEN", fill=(255, 255, 255), font=ImageFont.load_default(64 * SCALE), anchor="mm"
    )
    return image.reduce(SCALE)


def shapes() -> Image.Image:
    """A red circle, a blue square and a yellow triangle from left to right, 300x210 px."""
    image = Image.new("RGB", (300 * SCALE, 210 * SCALE), (245, 246, 248))
    draw = ImageDraw.Draw(image)
    draw.ellipse([v * SCALE for v in (24, 30, 94, 100)], fill=(215, 35, 40))
    draw.rectangle([v * SCALE for v in (122, 116, 182, 176)], fill=(35, 75, 215))
    draw.polygon([(x * SCALE, y * SCALE) for x, y in ((240, 36), (278, 104), (202, 104))], fill=(240, 205, 40))
    return image.reduce(SCALE)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    sign().save(folder / "sign.png")
    shapes().save(folder / "shapes.png")
