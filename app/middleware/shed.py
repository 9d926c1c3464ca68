"""Turn questions away while nobody could answer them, before they cost more than a glance.

Under a flood most requests end here: refusing one in a route takes three times as long, and all that time the event
loop answers nobody else, the probes included.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from app.engine.service import EngineService
from app.errors import ApiError

QUESTIONS = ("/v1/ask",)


class ShedMiddleware:
    """503 to questions while the engine is not ready, or while the queue of their class has no room."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in QUESTIONS:
            service: EngineService = scope["state"]["service"]
            try:
                service.require_ready()
                service.admission.refuse_early(scope["state"]["priority"])
            except ApiError as error:
                await error.send(scope, receive, send)
                return
        await self._app(scope, receive, send)
