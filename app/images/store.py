"""Upload once, ask many times: a bounded store of image files by their content hash."""

from collections import OrderedDict
from dataclasses import dataclass

from app.errors import ImageTooLarge, NotFound


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An uploaded file and what its header said.

    Attributes:
        data: The file's bytes.
        width: Upright width in pixels.
        height: Upright height in pixels.
        format: File format.
    """

    data: bytes
    width: int
    height: int
    format: str


class ImageStore:
    """Least recently used files go first when `capacity` bytes are passed.

    Args:
        capacity: Bytes kept.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._images: OrderedDict[str, StoredImage] = OrderedDict()
        self._bytes = 0

    def put(self, image_id: str, image: StoredImage) -> None:
        """Keep an image.

        Raises:
            ImageTooLarge: It alone is larger than the store.
        """
        if len(image.data) > self._capacity:
            raise ImageTooLarge(
                f"the file has {len(image.data)} bytes; the image store holds {self._capacity}",
                field="image",
                limit=self._capacity,
            )
        self._discard(image_id)
        self._images[image_id] = image
        self._bytes += len(image.data)
        while self._bytes > self._capacity:
            self._discard(next(iter(self._images)))

    def get(self, image_id: str) -> StoredImage:
        """Look an image up and mark it as used.

        Raises:
            NotFound: Never uploaded, deleted, or displaced by newer images.
        """
        image = self._images.get(image_id)
        if image is None:
            raise NotFound(
                f"no image {image_id!r} is stored (it may have been displaced); send it again with POST /v1/images",
                field="image_id",
            )
        self._images.move_to_end(image_id)
        return image

    def delete(self, image_id: str) -> None:
        """Forget an image.

        Raises:
            NotFound: There is none of that id.
        """
        self.get(image_id)
        self._discard(image_id)

    def _discard(self, image_id: str) -> None:
        if (image := self._images.pop(image_id, None)) is not None:
            self._bytes -= len(image.data)
