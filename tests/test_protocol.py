"""The HTTP protocol's bounds, with uvicorn on a real socket."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from app.protocol import MAX_HEAD_BYTES, MAX_HEADERS, ImpatientProtocol

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Service:
    """Reads the body, then answers when `answer` is set."""

    port: int = 0
    answer: asyncio.Event = field(default_factory=asyncio.Event)
    events: list[str] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.events.append("request")
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.disconnect":
            self.events.append("left")
            return
        answered = asyncio.ensure_future(self.answer.wait())
        left = asyncio.ensure_future(receive())
        await asyncio.wait({answered, left}, return_when=asyncio.FIRST_COMPLETED)
        if left.done():
            self.events.append("left")
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def until(self, event: str) -> None:
        async with asyncio.timeout(5):
            while event not in self.events:  # noqa: ASYNC110 (many events, one list)
                await asyncio.sleep(0.01)

    async def connect(self, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(sent)
        return reader, writer


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    service = Service()
    config = uvicorn.Config(service, port=0, http=ImpatientProtocol, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 (uvicorn has a flag, no event)
        await asyncio.sleep(0.01)
    service.port = server.servers[0].sockets[0].getsockname()[1]
    yield service
    service.answer.set()
    server.should_exit = True
    await serving


async def all_of(reader: asyncio.StreamReader) -> bytes:
    """What comes until the connection ends."""
    async with asyncio.timeout(5):
        return await reader.read()


async def test_requests_one_after_another_share_a_connection(service: Service) -> None:
    service.answer.set()
    reader, writer = await service.connect(GET)
    for _ in range(2 * MAX_HEAD_BYTES // len(GET)):
        assert await reader.readuntil(b"ok")
        writer.write(GET)
    assert service.events == ["request"] * len(service.events)


async def test_a_pipelined_request_is_not_answered_and_the_first_one_is(service: Service) -> None:
    reader, writer = await service.connect(GET + POST + b"3\r\nabc\r\n0\r\n\r\n" + GET)
    await service.until("request")
    writer.write(b"\0 is no method")
    await asyncio.sleep(0.05)
    service.answer.set()
    reply = await all_of(reader)
    assert reply.startswith(b"HTTP/1.1 200 OK\r\n")
    assert reply.count(b"HTTP/1.1") == 1
    assert b"connection: close" in reply.lower()
    assert service.events == ["request"]


@pytest.mark.parametrize("later", [GET, POST + b"5\r\nhal", b"GE", GET * 10_000])
async def test_a_client_that_pipelined_and_leaves_is_seen_to_leave(service: Service, later: bytes) -> None:
    _, writer = await service.connect(GET)
    await service.until("request")
    writer.write(later)
    await writer.drain()
    await asyncio.sleep(0.05)
    assert service.events == ["request"]
    writer.transport.abort()
    await service.until("left")


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nx: " + b"a" * (MAX_HEAD_BYTES + 1),
        b"GET /" + b"a" * (MAX_HEAD_BYTES + 1),
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n",
        GET + b"GET / HTTP/1.1\r\nx: " + b"a" * (MAX_HEAD_BYTES + 1),
    ],
    ids=["value", "path", "count", "second"],
)
async def test_a_head_without_end_is_refused(service: Service, head: bytes) -> None:
    service.answer.set()
    reader, writer = await service.connect(head[: len(GET)] if head.startswith(GET) else head)
    if head.startswith(GET):
        await reader.readuntil(b"ok")
        writer.write(head[len(GET) :])
    assert (await all_of(reader)).startswith(b"HTTP/1.1 431 ")
    assert service.events == ["request"] * head.startswith(GET)


async def test_a_head_within_the_bounds_is_read(service: Service) -> None:
    service.answer.set()
    headers = b"".join(b"x-%d: %s\r\n" % (number, b"a" * 200) for number in range(MAX_HEADERS - 1))
    reader, _ = await service.connect(b"GET / HTTP/1.1\r\nhost: x\r\n" + headers + b"\r\n")
    assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")


async def test_a_body_of_many_chunks_is_no_head(service: Service) -> None:
    service.answer.set()
    reader, writer = await service.connect(POST)
    for _ in range(200):
        writer.write(b"3e8\r\n" + b"a" * 1000 + b"\r\n")
        await writer.drain()
    writer.write(b"0\r\n\r\n")
    assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")


async def test_trailers_without_end_end_the_connection(service: Service) -> None:
    reader, writer = await service.connect(POST + b"3\r\nabc\r\n0\r\n")
    await service.until("request")
    writer.write(b"x: " + b"a" * (2 * MAX_HEAD_BYTES))
    assert await all_of(reader) == b""
    await service.until("left")
