"""Streams end: with the source, with its error, with the deadline, and for a reader that is slow."""

import asyncio
import time
from collections.abc import AsyncGenerator

import pytest

from app.engine.inflight import InFlight
from app.errors import DeadlineExceeded, Draining
from app.routers.streaming import KEEPALIVE_COMMENT, Opened, with_pings


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
    inflight = InFlight(time.monotonic(), 200)

    async def bytes_until_the_deadline() -> AsyncGenerator[bytes, None]:
        try:
            async for item in inflight.within(source(10_000, pause=0.001)):  # type: ignore[arg-type]
                yield item  # type: ignore[misc]
        except DeadlineExceeded:
            yield b"error"

    events = with_pings(bytes_until_the_deadline(), seconds=5)
    received = [await anext(events)]
    await asyncio.sleep(0.4)  # meanwhile the buffer is full and the deadline passes
    async with asyncio.timeout(5):
        received += [item async for item in events]
    assert received[-1] == b"error"


async def test_an_interrupted_request_ends_with_the_reason_given() -> None:
    inflight = InFlight(time.monotonic())
    events = inflight.within(source(2, pause=60))  # type: ignore[arg-type]
    step = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    inflight.interrupt(Draining("over"))
    async with asyncio.timeout(5):
        with pytest.raises(Draining, match="over"):
            await step
    with pytest.raises(Draining):  # and before its next step too
        async with inflight.enforced():
            pytest.fail("ran")


async def test_a_timeout_of_something_else_is_not_taken_for_the_deadline() -> None:
    inflight = InFlight(time.monotonic(), 60_000)
    with pytest.raises(TimeoutError):
        async with inflight.enforced():
            raise TimeoutError


@pytest.mark.parametrize("begun", [False, True])
async def test_a_source_whose_first_item_never_came_is_closed(begun: bool) -> None:
    closed = asyncio.Event()

    async def silent() -> AsyncGenerator[bytes, None]:
        try:
            await asyncio.sleep(60)
            yield b"x"
        finally:
            closed.set()

    opened = Opened(silent())
    await opened.arrived(0.01)
    if begun:
        reader = asyncio.ensure_future(anext(opened))
        await asyncio.sleep(0.01)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
    await opened.aclose()
    assert closed.is_set()


async def test_what_fails_before_the_first_item_is_raised_while_waiting() -> None:
    opened = Opened(source(0, error=ValueError("broken")))
    with pytest.raises(ValueError, match="broken"):
        await opened.arrived(5)
