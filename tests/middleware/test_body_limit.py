"""Bodies are bounded in size, in time, and all together; early refusals reach a client that is still writing."""

import asyncio
from typing import Any

import pytest

from app.middleware.body_limit import BodyLimitMiddleware
from app.settings import ServerSettings


async def reader(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Reads the whole body, then answers 200 when the test lets it."""
    while (await receive()).get("more_body", False):
        pass
    await scope["state"]["answer"].wait()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


class Exchange:
    """One request to the middleware, chunk by chunk."""

    def __init__(self, limited: BodyLimitMiddleware, *, length: int | None = None) -> None:
        self.chunks: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[dict[str, Any]] = []
        headers = [(b"transfer-encoding", b"chunked") if length is None else (b"content-length", str(length).encode())]
        self.answer = asyncio.Event()
        scope = {"type": "http", "headers": headers, "path": "/v1/ask", "state": {"answer": self.answer}}
        self.task = asyncio.create_task(limited(scope, self.chunks.get, self._send))

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    def chunk(self, size: int, more: bool = True) -> None:
        self.chunks.put_nowait({"type": "http.request", "body": b"x" * size, "more_body": more})

    async def status(self) -> int:
        async with asyncio.timeout(5):
            await self.task
        return int(self.sent[0]["status"])

    @property
    def closes(self) -> bool:
        return (b"connection", b"close") in self.sent[0]["headers"]


def limited(**settings: Any) -> BodyLimitMiddleware:
    return BodyLimitMiddleware(reader, ServerSettings(**settings))


@pytest.mark.parametrize("length", [None, 90], ids=["no-length", "length-that-lies"])
async def test_bytes_are_counted_whatever_the_headers_say(length: int | None) -> None:
    exchange = Exchange(limited(max_body_bytes=100), length=length)
    exchange.chunk(60)
    exchange.chunk(60)
    assert await exchange.status() == 413
    assert exchange.closes


async def test_a_declared_length_is_enough_to_refuse() -> None:
    exchange = Exchange(limited(max_body_bytes=100), length=101)
    exchange.chunk(101, more=False)
    assert await exchange.status() == 413


async def test_a_body_that_stops_coming_is_given_up() -> None:
    exchange = Exchange(limited(idle_timeout=0.05))
    exchange.chunk(10)
    assert await exchange.status() == 408
    assert exchange.closes


async def test_a_body_that_trickles_is_given_up() -> None:
    exchange = Exchange(limited(idle_timeout=0.2, body_timeout=0.3))
    while not exchange.task.done():
        exchange.chunk(1)
        await asyncio.sleep(0.05)
    assert await exchange.status() == 408


async def test_bodies_that_are_held_are_counted_together_until_their_answers_are_out() -> None:
    middleware = limited(max_buffered_bytes=100)
    first = Exchange(middleware)
    first.chunk(80, more=False)
    await asyncio.sleep(0)
    second = Exchange(middleware)
    second.chunk(80, more=False)
    assert await second.status() == 503
    assert middleware.held == 80
    first.answer.set()
    assert await first.status() == 200
    assert middleware.held == 0
    third = Exchange(middleware)
    third.chunk(80, more=False)
    third.answer.set()
    assert await third.status() == 200


async def test_a_body_is_forgotten_when_its_request_is_cancelled() -> None:
    middleware = limited()
    exchange = Exchange(middleware)
    exchange.chunk(80)
    while middleware.held != 80:  # noqa: ASYNC110
        await asyncio.sleep(0)
    exchange.task.cancel()
    await asyncio.gather(exchange.task, return_exceptions=True)
    assert middleware.held == 0
