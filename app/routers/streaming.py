"""Replies that end when the client leaves, and server-sent events with pings."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse
from starlette.types import Send

T = TypeVar("T")

PING_SECONDS = 15.0
_BUFFERED_EVENTS = 64


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


class EventStream(EventSourceResponse):
    """Server-sent events; the source is closed at once when the client leaves, not when it is garbage-collected."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        # Proxies must neither buffer nor cache a stream.
        super().__init__(events, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._events = events

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._events):
            await super().stream_response(send)


def event(name: str, data: str) -> bytes:
    """One event. `data` is JSON without line feeds (JSON escapes them), so one `data:` line holds it."""
    return f"event: {name}\ndata: {data}\n\n".encode()


async def with_pings(events: AsyncGenerator[bytes, None], seconds: float = PING_SECONDS) -> AsyncGenerator[bytes, None]:
    """Pass events on; after `seconds` without one send a comment, since proxies cut silent streams."""
    queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(_BUFFERED_EVENTS)

    async def pump() -> None:
        try:
            async with aclosing(events):
                async for each in events:
                    await queue.put(each)
        except Exception as error:  # the reader raises it
            await queue.put(error)
        else:
            await queue.put(None)

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
