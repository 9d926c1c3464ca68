"""A request on its way through the service: how far it is, and what ends it early."""

import asyncio
import contextlib
import enum
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from app.engine.generation import Events
from app.errors import ApiError, DeadlineExceeded


class Phase(enum.StrEnum):
    """Where a request is; `upload` is over before there is an `InFlight`."""

    UPLOAD = "upload"
    QUEUE = "queue"
    PREPROCESS = "preprocess"
    PREFILL = "prefill"
    DECODE = "decode"


class InFlight:
    """One request, from the end of its upload on.

    Args:
        arrived: Monotonic seconds when the request came in; `deadline_ms` counts from there.
        deadline_ms: Milliseconds that the whole request may take; None for no bound.

    Attributes:
        phase: How far it is.
        deadline: Monotonic seconds of its end, or None.
    """

    def __init__(self, arrived: float, deadline_ms: int | None = None) -> None:
        self.phase = Phase.QUEUE
        self.deadline = None if deadline_ms is None else arrived + deadline_ms / 1e3
        self._deadline_ms = deadline_ms
        self._interruption: ApiError | None = None
        self._timeout: asyncio.Timeout | None = None

    def interrupt(self, error: ApiError) -> None:
        """End the request with `error` at its next, or current, step."""
        self._interruption = error
        if self._timeout is not None:
            with contextlib.suppress(RuntimeError):  # it is ending already
                self._timeout.reschedule(time.monotonic())

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """A step: cancelled when the deadline comes or the request is interrupted.

        Raises:
            DeadlineExceeded: The deadline has passed.
            ApiError: What the request was interrupted with.
        """
        if self._interruption is not None:
            raise self._interruption
        timeout = asyncio.timeout(None if self.deadline is None else self.deadline - time.monotonic())
        try:
            async with timeout:
                self._timeout = timeout
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise self._interruption or DeadlineExceeded(
                f"the answer was not complete within deadline_ms={self._deadline_ms}",
                field="deadline_ms",
                limit=self._deadline_ms,
            ) from None
        finally:
            self._timeout = None

    async def within(self, events: Events) -> Events:
        """Pass events on until the end; closing this closes them.

        Each step is enforced, and never a `yield`, where the reader would be cancelled.
        """
        async with aclosing(events):
            while True:
                try:
                    async with self.enforced():
                        each = await anext(events)
                except StopAsyncIteration:
                    return
                yield each
