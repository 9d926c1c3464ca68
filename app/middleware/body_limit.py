"""Bound the request body on the stream itself, and let early refusals arrive.

Starlette's multipart parser has no total cap, and a `Content-Length` can lie or be absent, so bytes are counted as they
come. A reply that is sent before the body was read would meet a client that is still writing: a small rest is read
away first, a large one ends the connection.
"""

import asyncio

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import ApiError, BodyTooLarge, MalformedRequest, request_id_of

DRAIN_BYTES = 1 << 20
DRAIN_SECONDS = 5.0


class BodyLimitMiddleware:
    """Refuse bodies of more than `limit` bytes with 413.

    Args:
        app: The application inside.
        limit: Bytes.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(scope, receive, self._limit)

        async def send_after_body(message: Message) -> None:
            if message["type"] == "http.response.start" and not await body.drained():
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        try:
            body.check_declared_length()
            await self._app(scope, body.receive, send_after_body)
        except ApiError as error:
            await error.response(request_id_of(Request(scope)))(scope, receive, send_after_body)


class _Body:
    """Counts one request's body."""

    def __init__(self, scope: Scope, receive: Receive, limit: int) -> None:
        self._headers = Headers(scope=scope)
        self._receive = receive
        self._limit = limit
        self._read = 0
        self._complete = False

    def check_declared_length(self) -> None:
        declared = self._headers.get("content-length", "0")
        if not declared.isdecimal():
            raise MalformedRequest("the Content-Length header is not a number")
        if int(declared) > self._limit:
            raise self._too_large()

    async def receive(self) -> Message:
        message = await self._receive()
        self._count(message)
        if self._read > self._limit:
            raise self._too_large()
        return message

    async def drained(self) -> bool:
        """Read a small rest of the body away; False when the connection has to end instead."""
        if self._complete or not self._has_body():
            return True
        waits_for_continue = self._headers.get("expect", "").lower() == "100-continue" and self._read == 0
        if waits_for_continue or self._read > self._limit or self._declared_rest() > DRAIN_BYTES:
            return False
        until = self._read + DRAIN_BYTES
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while not self._complete and self._read < until:
                    self._count(await self._receive())
        except TimeoutError:
            return False
        return self._complete

    def _count(self, message: Message) -> None:
        if message["type"] == "http.request":
            self._read += len(message.get("body", b""))
            self._complete = not message.get("more_body", False)
        else:
            self._complete = True  # the client has gone

    def _has_body(self) -> bool:
        return "transfer-encoding" in self._headers or self._headers.get("content-length", "0") != "0"

    def _declared_rest(self) -> int:
        return int(self._headers.get("content-length", "0")) - self._read

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the request body is larger than {self._limit} bytes", limit=self._limit)
