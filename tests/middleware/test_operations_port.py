"""Metrics and documentation leave the first port for the second, which has nothing else but the probes."""

from typing import Any

import pytest

from app.middleware.operations_port import OperationsPortMiddleware


@pytest.mark.parametrize(
    ("port", "path", "status"),
    [
        (8000, "/v1/ask", 200),
        (8000, "/livez", 200),
        (8000, "/metrics", 404),
        (8000, "/docs", 404),
        (8000, "/docs/oauth2-redirect", 404),
        (8000, "/openapi.json", 404),
        (9000, "/metrics", 200),
        (9000, "/docs", 200),
        (9000, "/readyz", 200),
        (9000, "/v1/ask", 404),
        (9000, "/", 200),
        (8000, "/", 404),
    ],
)
async def test_each_port_has_its_paths(port: int, path: str, status: int) -> None:
    statuses = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    scope = {"type": "http", "path": path, "server": ("127.0.0.1", port), "headers": [(b"host", b"x:9000")]}
    await OperationsPortMiddleware(app, 9000)(scope, None, send)  # type: ignore[arg-type]
    assert statuses == [status]
