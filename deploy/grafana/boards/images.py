"""What clients send."""

from boards.shared import ENCODER_CACHE
from panels import board, only, panel, quantiles, rate

BOARD = board(
    "images",
    "Images",
    "What do clients send, and what does it cost?",
    [
        panel(
            "Images by format",
            "What is sent?",
            [(rate("askimage_images_total", "format", 'outcome="ok"'), "{{format}}")],
            "cps",
            stacked=True,
        ),
        panel(
            "Refused images",
            "What is sent in vain, and why?",
            [(rate("askimage_images_total", "outcome", 'outcome!="ok"'), "{{outcome}}")],
            "cps",
            alerts=["AskimageClientErrors"],
            stacked=True,
        ),
        ENCODER_CACHE,
    ],
    [
        panel(
            "Time of one image",
            "How long do decoding, scaling and patching take?",
            quantiles("askimage_image_decode_seconds"),
            "s",
        ),
        panel(
            "Images waiting for a thread",
            "Are there enough decoding threads (ASKIMAGE_IMAGES__WORKERS)?",
            [(f"sum by (instance) ({only('askimage_preprocess_waiting')})", "{{instance}}")],
        ),
    ],
    [
        panel("Bytes", "How large are the files?", quantiles("askimage_image_bytes"), "bytes"),
        panel("Pixels", "How large are the pictures?", quantiles("askimage_image_pixels")),
        panel("Tokens", "How much of the context does one picture take?", quantiles("askimage_image_tokens")),
    ],
)
