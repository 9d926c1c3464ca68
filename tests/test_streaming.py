"""Streams end: with the source, with its error, with the deadline, and for a reader that is slow."""

import asyncio
import time
from collections.abc import AsyncGenerator

import pytest

from app.errors import DeadlineExceeded
from app.routers.ask import Deadline
from app.routers.streaming import KEEPALIVE_COMMENT, with_pings


async def source(count: int, pause: float = 0.0, error: Exception | None = None) -> AsyncGenerator[bytes, None]:
    for number in range(count):
        await asyncio.sleep(pause)
        yield b"%d" % number
    if error is not None:
        raise error


async def test_silence_is_filled_with_pings() -> None:
    received = [item async for item in with_pings(source(2, pause=0.25), seconds=0.1)]
    assert [item for item in received if item != KEEPALIVE_COMMENT] == [b"0", b"1"]
    assert received.count(KEEPALIVE_COMMENT) >= 2


async def test_an_error_of_the_source_reaches_the_reader() -> None:
    with pytest.raises(ValueError, match="broken"):
        _ = [item async for item in with_pings(source(1, error=ValueError("broken")))]


async def test_a_reader_that_stops_closes_the_source() -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                await asyncio.sleep(0)
                yield b"x"
        finally:
            closed.set()

    events = with_pings(endless())
    assert await anext(events) == b"x"
    await events.aclose()
    assert closed.is_set()


async def test_a_deadline_ends_the_stream_of_a_slow_reader() -> None:
    deadline = Deadline(time.monotonic(), 200)

    async def bytes_until_the_deadline() -> AsyncGenerator[bytes, None]:
        try:
            async for item in deadline.within(source(10_000)):  # type: ignore[arg-type]
                yield item  # type: ignore[misc]
        except DeadlineExceeded:
            yield b"error"

    events = with_pings(bytes_until_the_deadline(), seconds=5)
    received = [await anext(events)]
    await asyncio.sleep(0.4)  # meanwhile the buffer is full and the deadline passes
    async with asyncio.timeout(5):
        received += [item async for item in events]
    assert received[-1] == b"error"
