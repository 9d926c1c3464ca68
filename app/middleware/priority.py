"""Tag each request with its class of service from `X-Priority`: realtime, normal (the default) or batch."""

from typing import get_args

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from app.engine.request import PriorityClass
from app.errors import MalformedRequest, request_id_of

CLASSES = get_args(PriorityClass)


class PriorityMiddleware:
    """Sets `priority` in the state of requests for answers; a class that does not exist is answered with 400."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            asked = Headers(scope=scope).get("x-priority", "normal").strip().lower()
            if asked not in CLASSES:
                error = MalformedRequest(f"X-Priority must be one of {', '.join(CLASSES)}, not {asked!r}")
                await error.response(request_id_of(Request(scope)))(scope, receive, send)
                return
            scope.setdefault("state", {})["priority"] = asked
        await self._app(scope, receive, send)
