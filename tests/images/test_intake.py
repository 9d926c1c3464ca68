"""Decoding: the pixels a person would see, and nothing that is not an image."""

import io

import numpy as np
import pytest
from PIL import Image, ImageCms

from app.errors import ImageTooLarge, UndecodableImage, UnsupportedImage
from app.images.intake import FORMATS, decode

LIMIT = 1_000_000


def encode(image: Image.Image, **save: object) -> bytes:
    file = io.BytesIO()
    image.save(file, **({"format": "PNG"} | save))
    return file.getvalue()


def pixels(data: bytes) -> np.ndarray:
    image = decode(data, max_pixels=LIMIT).pixels
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


def quadrants() -> Image.Image:
    """Red, green / blue, yellow: every turn and mirroring looks different."""
    image = Image.new("RGB", (32, 16))
    for box, color in zip(
        [(0, 0), (16, 0), (0, 8), (16, 8)], ["#d72328", "#28a53c", "#234bd7", "#f5dc28"], strict=True
    ):
        image.paste(color, (*box, box[0] + 16, box[1] + 8))
    return image


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_on_the_list_is_decoded(name: str) -> None:
    seen = decode(encode(quadrants(), format=name), max_pixels=LIMIT)
    assert seen.format == name
    difference = np.abs(np.asarray(seen.pixels).astype(int) - np.asarray(quadrants()).astype(int))
    assert difference.mean() < 12  # JPEG and WebP blur the edges


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int) -> None:
    turns = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    turn = turns[orientation]
    stored = quadrants() if turn is None else quadrants().transpose(turn)
    exif = Image.Exif()
    exif[0x0112] = orientation
    sizes: list[tuple[int, int]] = []
    data = encode(stored, exif=exif)
    seen = decode(data, max_pixels=LIMIT, check_size=lambda width, height: sizes.append((width, height)))
    assert np.array_equal(np.asarray(seen.pixels), np.asarray(quadrants()))
    assert sizes == [(32, 16)]


def test_transparency_is_white_and_hides_what_is_under_it() -> None:
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 0, 128))
    assert pixels(encode(image)).tolist() == [[[255, 255, 255], [127, 127, 127]]]
    palette = Image.new("P", (1, 1), 0)
    palette.putpalette([255, 0, 0])
    assert pixels(encode(palette, transparency=0)).tolist() == [[[255, 255, 255]]]
    assert pixels(encode(Image.new("LA", (1, 1), (0, 0)))).tolist() == [[[255, 255, 255]]]


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    ramp = Image.fromarray(np.array([[0, 0x7FFF, 0xFFFF]], np.uint16))
    assert pixels(encode(ramp))[0, :, 0].tolist() == [0, 127, 255]
    floats = Image.fromarray(np.array([[0.0, 0.5, 1.0]], np.float32))
    assert pixels(encode(floats, format="TIFF"))[0, :, 0].tolist() == [0, 128, 255]


def test_cmyk_becomes_rgb() -> None:
    white = Image.new("CMYK", (8, 8), (0, 0, 0, 0))
    assert pixels(encode(white, format="JPEG")).min() > 250


def test_an_icc_profile_is_applied_and_a_broken_one_ignored() -> None:
    image = Image.new("RGB", (1, 1), (200, 100, 50))
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert np.abs(pixels(encode(image, icc_profile=srgb)) - [200, 100, 50]).max() <= 1
    assert pixels(encode(image, icc_profile=b"no profile")).tolist() == [[[200, 100, 50]]]


def test_the_first_frame_of_an_animation_is_taken_and_the_others_counted() -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "lime", "blue")]
    seen = decode(encode(frames[0], format="GIF", save_all=True, append_images=frames[1:]), max_pixels=LIMIT)
    assert (seen.frames, seen.pixels.getpixel((0, 0))) == (3, (255, 0, 0))


@pytest.mark.parametrize(
    "data", [b"", b"text", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"\x89HDF\r\n\x1a\n"]
)
def test_what_is_no_image_of_a_listed_format_is_unsupported(data: bytes) -> None:
    with pytest.raises(UnsupportedImage):
        decode(data, max_pixels=LIMIT)


def test_a_cut_file_is_undecodable() -> None:
    with pytest.raises(UndecodableImage):
        decode(encode(quadrants(), format="JPEG")[:300], max_pixels=LIMIT)


def test_too_many_pixels_are_refused_before_they_are_decoded() -> None:
    data = encode(Image.new("1", (2000, 2000)))
    with pytest.raises(ImageTooLarge, match="2000×2000"):
        decode(data[:100], max_pixels=LIMIT)  # the header is enough
