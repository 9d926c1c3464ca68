"""Replies that end when the client leaves, and server-sent events with pings.

A reader that is slow does not hold the engine: its events wait here, no more than one answer's, and a connection that
takes nothing for long is cut by the server's protocol (`app.protocol`).
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack, aclosing
from typing import Any, Generic, Protocol, TypeVar

from fastapi import Request
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse
from starlette.types import Send

T = TypeVar("T")

PING_SECONDS = 15.0


class Closable(Protocol):
    """What `aclosing` takes."""

    async def aclose(self) -> object: ...


class ClientGone(Exception):
    """The client closed the connection; nobody reads a reply."""


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, cancelled when the client leaves: Starlette does not do that for replies that do not stream.

    Raises:
        ClientGone: The client left first.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Opened(Generic[T]):
    """An iterator whose first item may be on its way.

    Args:
        events: The source; closing this closes it, begun or not.
    """

    def __init__(self, events: AsyncGenerator[T, None]) -> None:
        self._events = events
        self._first: asyncio.Future[T] | None = asyncio.ensure_future(anext(events))

    async def arrived(self, seconds: float) -> None:
        """Wait until the first item is there, but no longer than that; raises what the source raises before it."""
        assert self._first is not None
        await asyncio.wait({self._first}, timeout=seconds)
        if self._first.done():
            self._first.result()

    def __aiter__(self) -> "Opened[T]":
        return self

    async def __anext__(self) -> T:
        first, self._first = self._first, None
        return await (first if first is not None else anext(self._events))

    async def aclose(self) -> None:
        if self._first is not None:
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        await self._events.aclose()


class EventStream(EventSourceResponse):
    """Server-sent events; the source is closed at once when the client leaves, not when it is garbage-collected.

    Args:
        events: Framed events.
        source: Where they come from; closed with them, also when the reply never began.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], source: Closable) -> None:
        # Proxies must neither buffer nor cache a stream.
        super().__init__(events, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._closing = (source, events)

    async def stream_response(self, send: Send) -> None:
        async with AsyncExitStack() as stack:
            for each in self._closing:
                await stack.enter_async_context(aclosing(each))
            await super().stream_response(send)


def event(name: str, data: str) -> bytes:
    """One event. `data` is JSON without line feeds (JSON escapes them), so one `data:` line holds it."""
    return f"event: {name}\ndata: {data}\n\n".encode()


async def with_pings(events: AsyncGenerator[bytes, None], seconds: float = PING_SECONDS) -> AsyncGenerator[bytes, None]:
    """Pass events on; after `seconds` without one send a comment, since proxies cut silent streams."""
    queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()

    async def pump() -> None:
        try:
            async with aclosing(events):
                async for each in events:
                    queue.put_nowait(each)
        except Exception as error:  # the reader raises it
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    task = asyncio.create_task(pump())
    try:
        while True:
            try:
                async with asyncio.timeout(seconds):
                    item = await queue.get()
            except TimeoutError:
                yield KEEPALIVE_COMMENT
                continue
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
