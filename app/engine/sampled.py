"""Readings of the machine, taken on a thread of their own: a driver that hangs costs fresh figures, nothing else."""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import psutil

logger = logging.getLogger(__name__)

T = TypeVar("T")

SAMPLE_SECONDS = 1.0
STALE_SECONDS = 10.0


class Sampled(Generic[T]):
    """A reading that is repeated in the background, so that whoever wants it never waits.

    Args:
        read: Takes the reading; called once at once, and every second after `start`.
        stale: What stands for a reading older than 10 s.
    """

    def __init__(self, read: Callable[[], T], stale: T) -> None:
        self._read = read
        self._stale = stale
        self._stop = threading.Event()
        self._started = False
        self._take()

    @property
    def latest(self) -> T:
        """The last reading."""
        if self._started and time.monotonic() - self._taken > STALE_SECONDS:
            return self._stale
        return self._reading

    def start(self) -> None:
        """Repeat the reading until `stop`."""
        self._started = True
        threading.Thread(target=self._repeat, name="sampled", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def _repeat(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            try:
                self._take()
            except Exception as error:  # the next one may do better
                logger.warning("a reading failed: %r", error)

    def _take(self) -> None:
        self._reading = self._read()
        self._taken = time.monotonic()


def resident_memory() -> dict[str, int]:
    """Bytes of main memory held by this process (`service`) and by those it started (`engine`)."""
    sizes = {"service": 0, "engine": 0}
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        try:
            sizes["service" if process.pid == os.getpid() else "engine"] += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return sizes
