"""Give every request an id and an arrival time.

A client's `X-Request-ID` is kept when it is harmless in logs and headers, else replaced. The id is in the reply's
header, in every problem document and in the engine's own logs.
"""

import re
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SAFE = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_HEADER = "x-request-id"


class RequestIdMiddleware:
    """Sets `request_id` and `arrived` (monotonic seconds) in the scope's state."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _client_id(scope) or uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"], state["arrived"] = request_id, time.monotonic()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def _client_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == _HEADER.encode() and _SAFE.fullmatch(value):
            return str(value.decode("ascii"))
    return None
