"""What is measured of image files."""

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from app.engine.request import PreparedImage

UNKNOWN_FORMAT = "unknown"

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
BYTES_BUCKETS = tuple(1 << bits for bits in range(12, 29, 2))  # 4 KiB to 256 MiB
PIXELS_BUCKETS = (1e4, 3e4, 1e5, 3e5, 1e6, 3e6, 1e7, 3e7, 1e8)


class ImageTelemetry:
    """Series of the decoding pool.

    Args:
        registry: Where they are registered.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"askimage_image_{name}", text, buckets=buckets, registry=registry)

        self._images = Counter(
            "askimage_images",
            "Image files by format and by what became of them: ok, or an error code.",
            ["format", "outcome"],
            registry=registry,
        )
        self._bytes = histogram("bytes", "Size of image files.", BYTES_BUCKETS)
        self._pixels = histogram("pixels", "Width times height of images as they came.", PIXELS_BUCKETS)
        self._seconds = histogram("decode_seconds", "Decoding, scaling and patching one image.", SECONDS_BUCKETS)

    def prepared(self, image: PreparedImage, size: int, seconds: float) -> None:
        """Count an image of `size` bytes that took a thread `seconds`."""
        self._images.labels(image.format, "ok").inc()
        self._bytes.observe(size)
        self._pixels.observe(image.width * image.height)
        self._seconds.observe(seconds)

    def refused(self, outcome: str) -> None:
        """Count a file that ended with an error code."""
        self._images.labels(UNKNOWN_FORMAT, outcome).inc()
