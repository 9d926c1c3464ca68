"""The decoding pool: image work runs here, so that the event loop never waits for pixels.

Threads, not processes: Pillow, NumPy and torch release the GIL in their inner loops, and six megabytes of patches per
1024² image would otherwise be pickled between processes.
"""

import asyncio
import contextlib
import heapq
import itertools
import time
from concurrent.futures import Future, ThreadPoolExecutor

from app.engine.adapter import Adapter
from app.engine.request import PRIORITIES, PreparedImage, PriorityClass
from app.errors import ApiError, ImageTooLarge, Overloaded
from app.images.intake import decode
from app.images.telemetry import ImageTelemetry
from app.settings import ImageSettings

MOST_WAITING = 4096


class ImagePool:
    """A bounded number of threads that make uploaded files ready for a model; higher classes go first.

    Args:
        settings: Limits and number of threads.
        telemetry: Where files are measured.
    """

    def __init__(self, settings: ImageSettings, telemetry: ImageTelemetry) -> None:
        self._settings = settings
        self._telemetry = telemetry
        self._executor = ThreadPoolExecutor(settings.workers, thread_name_prefix="image")
        self._free = settings.workers
        self._order = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @property
    def waiting(self) -> int:
        """Images that wait for a thread."""
        return len(self._waiting)

    async def prepare(self, data: bytes, adapter: Adapter, priority: PriorityClass) -> PreparedImage:
        """Decode and patch one file; a caller that is cancelled takes work that has not begun off the queue.

        Raises:
            ApiError: 413, 415 or 422, see `app.images.intake.decode`; 503 when too many images wait.
        """
        try:
            image, seconds = await self._prepare(data, adapter, priority)
        except ApiError as error:
            self._telemetry.refused(error.code)
            raise
        self._telemetry.prepared(image, len(data), seconds)
        return image

    def close(self) -> None:
        """Drop what has not begun."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _prepare(self, data: bytes, adapter: Adapter, priority: PriorityClass) -> tuple[PreparedImage, float]:
        limit = self._settings.max_bytes
        if len(data) > limit:
            raise ImageTooLarge(
                f"the file has {len(data)} bytes; at most {limit} are taken", field="image", limit=limit
            )
        await self._turn(PRIORITIES[priority])
        loop = asyncio.get_running_loop()
        work = self._executor.submit(self._work, data, adapter)

        def done(_: Future[tuple[PreparedImage, float]]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._release)

        work.add_done_callback(done)  # and not when the caller is cancelled: the thread is busy until then
        return await asyncio.wrap_future(work)

    async def _turn(self, rank: int) -> None:
        if self._free > 0:
            self._free -= 1
            return
        if len(self._waiting) >= MOST_WAITING:
            raise Overloaded(f"{MOST_WAITING} images wait to be decoded, and no more may", retry_after=1)
        turn = asyncio.get_running_loop().create_future()
        entry = (rank, next(self._order), turn)
        heapq.heappush(self._waiting, entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release()
            elif entry in self._waiting:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            raise

    def _release(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def _work(self, data: bytes, adapter: Adapter) -> tuple[PreparedImage, float]:
        began = time.monotonic()
        image = decode(data, max_pixels=self._settings.max_pixels, check_size=adapter.check_size)
        return adapter.prepare(image), time.monotonic() - began
