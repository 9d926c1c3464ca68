"""A second port for what operators look at, so that the first one can face the world."""

from starlette.types import ASGIApp, Receive, Scope, Send

from app.errors import NotFound

OPERATIONS = ("/metrics", "/docs", "/openapi.json")
PROBES = ("/livez", "/readyz", "/healthz", "/health")


class OperationsPortMiddleware:
    """Answers `/metrics` and `/docs` on the operations port alone, and nothing there but these and the probes.

    Args:
        app: The application inside.
        port: The operations port.
    """

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        self._port = port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            # The socket's own address: a Host header says what the client likes.
            on_operations_port = scope["server"] is not None and scope["server"][1] == self._port
            is_operations = scope["path"] == "/" or scope["path"].startswith(OPERATIONS)  # "/" leads to /docs
            if is_operations != on_operations_port and scope["path"] not in PROBES:
                await NotFound("Not Found").send(scope, receive, send)
                return
        await self._app(scope, receive, send)
