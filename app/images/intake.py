"""From uploaded bytes to the pixels a person sees: guards first, then decoding.

Everything here is synchronous and runs in the decoding pool (`app/images/pool.py`), never on the event loop.
"""

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

from app.errors import ApiError, ImageTooLarge, UndecodableImage, UnsupportedImage

Image.init()
# Pillow decodes only these; its other plug-ins (EPS, PDF, HDF5, …) are never tried on uploaded bytes.
FORMATS = tuple(name for name in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF") if name in Image.OPEN)
_REPORTED_AS = {"MPO": "JPEG"}  # several JPEGs in one file, opened as JPEG
# Pillow's limit warns at one size and refuses at twice that; `max_pixels` below is the one that counts.
Image.MAX_IMAGE_PIXELS = None
_SRGB = ImageCms.createProfile("sRGB")


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """Pixels ready for a model.

    Attributes:
        id: SHA-256 of the file's bytes, in hexadecimal.
        format: File format, as on the allow-list.
        pixels: RGB, upright, on white where it was transparent.
        frames: Frames or pages in the file; the first one was taken.
    """

    id: str
    format: str
    pixels: Image.Image
    frames: int


def image_id(data: bytes) -> str:
    """Content hash that names an image everywhere: replies, uploads, caches."""
    return hashlib.sha256(data).hexdigest()


def decode(
    data: bytes, *, max_pixels: int, check_size: Callable[[int, int], None] = lambda width, height: None
) -> DecodedImage:
    """Decode one image file.

    Args:
        data: The file.
        max_pixels: Width × height that is refused before any pixel is decoded.
        check_size: Further check on width and height in pixels, upright, from the header.

    Raises:
        UnsupportedImage: Not an image, or not a format on the allow-list.
        ImageTooLarge: More than `max_pixels`, or what `check_size` raises.
        UndecodableImage: Truncated or damaged.
    """
    if not data:
        raise UnsupportedImage("the file is empty; send the image's bytes", field="image")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_header(image, max_pixels, check_size)
            image.load()
            pixels = _to_rgb(ImageOps.exif_transpose(image))
            frames: int = getattr(image, "n_frames", 1)
            name = str(image.format)
    except ApiError:
        raise
    except UnidentifiedImageError:
        raise UnsupportedImage(
            f"the file is not an image in a format this service takes ({', '.join(FORMATS)})", field="image"
        ) from None
    except Exception as error:  # Pillow's decoders raise nearly anything on hostile input
        raise UndecodableImage(f"the image is truncated or damaged: {error}", field="image") from error
    return DecodedImage(image_id(data), _REPORTED_AS.get(name, name), pixels, frames)


def _check_header(image: Image.Image, max_pixels: int, check_size: Callable[[int, int], None]) -> None:
    width, height = image.size
    if width * height > max_pixels:
        raise ImageTooLarge(
            f"the image has {width}×{height} pixels; at most {max_pixels} are taken", field="image", limit=max_pixels
        )
    if image.getexif().get(0x0112, 1) in {5, 6, 7, 8}:  # EXIF orientation: turned by a quarter
        width, height = height, width
    check_size(width, height)


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert any mode to 8-bit RGB as a viewer would show it."""
    image = _to_eight_bits(image)
    if image.mode in ("P", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
    profile = image.info.get("icc_profile")
    if image.mode in ("RGBA", "LA", "RGBa", "La"):
        image = image.convert("RGBA")
        canvas = Image.new("RGBA", image.size, "white")
        canvas.alpha_composite(image)
        image = canvas.convert("RGB")
    if profile and image.mode in ("RGB", "CMYK", "L"):
        image = _to_srgb(image, profile)
    return image.convert("RGB")


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit and floating-point greys to 0-255 instead of clipping them, as `Image.convert` would."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        values = np.array(image, np.float32)  # one copy, changed in place: these files can be large
        np.nan_to_num(values, copy=False)
        # Integers come from 16-bit files; floats are either in 0-1 or in the file's own range.
        top = 65535.0 if image.mode == "I" else max(1.0, float(values.max(initial=0.0)))
        values.clip(0, top, out=values)
        values *= 255.0 / top
        return Image.fromarray(values.round(out=values).astype(np.uint8))
    return image


def _to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """Apply the embedded ICC profile; a profile that cannot be read or does not fit the mode is ignored."""
    try:
        converted = ImageCms.profileToProfile(image, io.BytesIO(profile), _SRGB, outputMode="RGB")
    except (ImageCms.PyCMSError, OSError):
        return image
    return converted if converted is not None else image
