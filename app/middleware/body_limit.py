"""Bound the request body on the stream itself, in size and in time, and let early refusals arrive.

Starlette's multipart parser has no total cap, and a `Content-Length` can lie or be absent, so bytes are counted as they
come; those of all requests together too, since a body is held, in memory or on disk, until its answer is out. A reply
that is sent before the body was read would meet a client that is still writing: a small rest is read away first, a
large one ends the connection.
"""

import asyncio
import time
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import ApiError, BodyTooLarge, MalformedRequest, Overloaded, RequestTimeout
from app.settings import ServerSettings

DRAIN_BYTES = 1 << 20
DRAIN_SECONDS = 5.0


class BodyLimitMiddleware:
    """Refuse bodies that are too large with 413, that come too slowly with 408, that nobody can hold now with 503.

    Args:
        app: The application inside.
        settings: `max_body_bytes`, `max_buffered_bytes`, `body_timeout`, `idle_timeout`.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._held = 0

    @property
    def held(self) -> int:
        """Bytes of all bodies that are held now."""
        return self._held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(scope, receive, self._settings, self._hold)

        async def send_after_body(message: Message) -> None:
            if message["type"] == "http.response.start" and not await body.drained():
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        try:
            body.check_declared_length()
            await self._app(scope, body.receive, send_after_body)
        except ApiError as error:
            await error.send(scope, receive, send_after_body)
        finally:
            self._held -= body.read

    def _hold(self, length: int) -> None:
        self._held += length
        if self._held > self._settings.max_buffered_bytes:
            raise Overloaded("the service holds as many request bodies as it can", retry_after=1)


class _Body:
    """Counts one request's body."""

    def __init__(self, scope: Scope, receive: Receive, settings: ServerSettings, hold: Callable[[int], None]) -> None:
        self._headers = Headers(scope=scope)
        self._receive = receive
        self._settings = settings
        self._hold = hold
        self._end: float | None = None
        self._given_up = False
        self._complete = not self._has_body()
        self.read = 0

    def check_declared_length(self) -> None:
        declared = self._headers.get("content-length", "0")
        if not declared.isdecimal():
            raise MalformedRequest("the Content-Length header is not a number")
        if int(declared) > self._settings.max_body_bytes:
            raise self._too_large()

    async def receive(self) -> Message:
        if self._complete:  # what comes now is that the client leaves
            return await self._receive()
        try:
            async with asyncio.timeout(self._patience()):
                message = await self._receive()
            self._count(message)
        except (TimeoutError, Overloaded) as error:
            self._given_up = True
            if isinstance(error, Overloaded):
                raise
            raise RequestTimeout(
                f"{self.read} bytes of the request body came, and then none for {self._settings.idle_timeout:g} s, "
                f"or not all within {self._settings.body_timeout:g} s"
            ) from None
        if self.read > self._settings.max_body_bytes:
            raise self._too_large()
        return message

    def _patience(self) -> float:
        now = time.monotonic()
        self._end = self._end or now + self._settings.body_timeout
        return min(self._settings.idle_timeout, self._end - now)

    async def drained(self) -> bool:
        """Read a small rest of the body away; False when the connection has to end instead."""
        if self._complete:
            return True
        waits_for_continue = self._headers.get("expect", "").lower() == "100-continue" and self.read == 0
        too_much = self.read > self._settings.max_body_bytes or self._declared_rest() > DRAIN_BYTES
        if self._given_up or waits_for_continue or too_much:
            return False
        until = self.read + DRAIN_BYTES
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while not self._complete and self.read < until:
                    self._count(await self._receive())
        except (TimeoutError, Overloaded):
            return False
        return self._complete

    def _count(self, message: Message) -> None:
        if message["type"] == "http.request":
            length = len(message.get("body", b""))
            self.read += length
            self._hold(length)
            self._complete = not message.get("more_body", False)
        else:
            self._complete = True  # the client has gone

    def _has_body(self) -> bool:
        return "transfer-encoding" in self._headers or self._headers.get("content-length", "0") != "0"

    def _declared_rest(self) -> int:
        return int(self._headers.get("content-length", "0")) - self.read

    def _too_large(self) -> BodyTooLarge:
        limit = self._settings.max_body_bytes
        return BodyTooLarge(f"the request body is larger than {limit} bytes", limit=limit)
