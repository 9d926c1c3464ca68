"""One line for every request when it ends, with all that the service knows of it; the request's id in every other line.
Questions are counted where they are logged, so that the counts and the lines agree.

Inner layers add what they know (the key's name, the class, timings, token counts, the outcome) to the dictionary
`scope["state"]["log"]`. Never the query string, headers or bodies: those are the client's.
"""

import logging
import time
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars, reset_contextvars

from app.errors import ApiError
from app.identity import is_question
from app.logs import mark_logged
from app.middleware.operations_port import PROBES
from app.tracing import current_trace_id

logger = logging.getLogger("app.access")

QUIET = (*PROBES, "/metrics")
CLIENT_LEFT = 499  # nginx's status of a request whose client did not wait for the reply


class AccessLogMiddleware:
    """Logs each request and binds its `request_id`; just inside of the RequestIdMiddleware, which gives it one.

    Args:
        app: The application inside.
        slow_seconds: A question that takes longer is logged as a warning.
    """

    def __init__(self, app: ASGIApp, slow_seconds: float) -> None:
        self._app = app
        self._slow_seconds = slow_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["state"]["log"] = {}
        exchange = _Exchange(scope, receive, send, self._slow_seconds)
        trace_id = current_trace_id()
        trace = {} if trace_id is None else {"trace_id": trace_id}
        bound = bind_contextvars(request_id=scope["state"]["request_id"], **trace)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception as error:
            if exchange.left and isinstance(error, ClientDisconnect):
                exchange.log()
            else:
                exchange.log(error)
            mark_logged(error)
            raise
        except BaseException:  # cancelled, as at a shutdown that waits no longer
            exchange.log()
            raise
        else:
            exchange.log()
        finally:
            reset_contextvars(**bound)


class _Exchange:
    """What passes between client and service in one request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, slow_seconds: float) -> None:
        self._slow_seconds = slow_seconds
        self._scope = scope
        self._receive = receive
        self._send = send
        self._begun = time.monotonic()
        self._status: int | None = None
        self._received = 0
        self._sent = 0
        self.left = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._received += len(message.get("body", b""))
        else:
            self.left = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            # What is sent to a client that has left goes nowhere.
            self._status = CLIENT_LEFT if self.left else message["status"]
        elif message["type"] == "http.response.body" and not self.left:
            self._sent += len(message.get("body", b""))
        await self._send(message)

    def log(self, error: Exception | None = None) -> None:
        """Log the request as ended, by `error` if one escaped; without a reply the server answers 500."""
        status = 500 if error is not None else self._status or (CLIENT_LEFT if self.left else 500)
        seconds = time.monotonic() - self._begun
        fields: dict[str, Any] = {
            "method": self._scope["method"],
            "path": self._scope["path"],
            "status": status,
            "duration_ms": round(seconds * 1e3, 1),
            "request_bytes": self._received,
            "response_bytes": self._sent,
        }
        known = self._scope["state"]["log"] | ({} if error is None else {"error": ApiError.code})
        fields |= {name: value for name, value in known.items() if name not in fields}
        if is_question(self._scope):
            self._count(known, status)
            if seconds > self._slow_seconds and error is None:
                logger.warning("slow request", extra=fields)
                return
        logger.log(self._level(status, error), "request", extra=fields, exc_info=error)

    def _count(self, known: dict[str, Any], status: int) -> None:
        ended = "cancelled" if status == CLIENT_LEFT else ApiError.code
        outcome = known.get("outcome") or known.get("error") or ended
        requests = self._scope["state"]["service"].telemetry.requests
        requests.labels(self._scope["path"], known.get("class", "unknown"), outcome).inc()

    def _level(self, status: int, error: Exception | None) -> int:
        if error is not None:  # a fault of ours, to be seen at any level
            return logging.ERROR
        if self._scope["path"] in QUIET:
            return logging.DEBUG
        return logging.WARNING if status >= 500 else logging.INFO
