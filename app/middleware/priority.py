"""Give each request its class of service: realtime, normal or batch.

`X-Priority` asks for one; without it the client's tier decides, which also says how high it may ask.
"""

from typing import get_args

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.engine.request import PRIORITIES, PriorityClass
from app.errors import ApiError, ClassForbidden, MalformedRequest
from app.identity import Client, Tier, is_api

CLASSES: tuple[PriorityClass, ...] = get_args(PriorityClass)


class PriorityMiddleware:
    """Sets `priority` in the state of requests to the API, and `class` in what is logged of them.

    A class that does not exist is answered with 400, one above the tier's highest with 403. Inside of the
    AuthMiddleware, which finds the client.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_api(scope["path"]):
            state = scope["state"]
            client: Client = state["client"]
            try:
                priority = _class(Headers(scope=scope).get("x-priority"), client.tier)
            except ApiError as error:
                await error.send(scope, receive, send)
                return
            state["priority"] = priority
            state.setdefault("log", {})["class"] = priority
        await self._app(scope, receive, send)


def _class(header: str | None, tier: Tier) -> PriorityClass:
    if header is None:
        return tier.default_class
    asked = header.strip().lower()
    for priority in CLASSES:
        if priority == asked:
            break
    else:
        raise MalformedRequest(f"X-Priority must be one of {', '.join(CLASSES)}, not {asked!r}")
    allowed = [name for name in CLASSES if PRIORITIES[name] >= PRIORITIES[tier.max_class]]
    if priority not in allowed:
        raise ClassForbidden(f"X-Priority: this client's tier allows {' and '.join(allowed)}, not {priority}")
    return priority
