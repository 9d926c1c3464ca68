"""The decoding pool: image work runs here, so that the event loop never waits for pixels.

Threads, not processes: Pillow, NumPy and torch release the GIL in their inner loops, and six megabytes of patches per
1024² image would otherwise be pickled between processes.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from app.engine.adapter import Adapter
from app.engine.request import PreparedImage
from app.errors import ImageTooLarge
from app.images.intake import decode
from app.settings import ImageSettings


class ImagePool:
    """A bounded number of threads that make uploaded files ready for a model.

    Args:
        settings: Limits and number of threads.
    """

    def __init__(self, settings: ImageSettings) -> None:
        self._settings = settings
        self._executor = ThreadPoolExecutor(settings.workers, thread_name_prefix="image")

    async def prepare(self, data: bytes, adapter: Adapter) -> PreparedImage:
        """Decode and patch one file; a caller that is cancelled takes work that has not begun off the queue.

        Raises:
            ApiError: 413, 415 or 422, see `app.images.intake.decode`.
        """
        limit = self._settings.max_bytes
        if len(data) > limit:
            raise ImageTooLarge(
                f"the file has {len(data)} bytes; at most {limit} are taken", field="image", limit=limit
            )
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._work, data, adapter)

    def close(self) -> None:
        """Drop what has not begun."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _work(self, data: bytes, adapter: Adapter) -> PreparedImage:
        image = decode(data, max_pixels=self._settings.max_pixels, check_size=adapter.check_size)
        return adapter.prepare(image)
