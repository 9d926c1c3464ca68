"""The outermost span of each request to the API; what inner layers do is inside of it.

Our own rather than OpenTelemetry's ASGI instrumentation, which records query strings and headers: those are the
client's.
"""

from opentelemetry import trace
from opentelemetry.trace import Tracer
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.identity import is_api
from app.tracing import mark_failed, start_request


class TraceMiddleware:
    """Takes up the client's trace (W3C `traceparent`), or begins one.

    Inside of the RequestIdMiddleware, outside of the AccessLogMiddleware, whose lines name the trace.

    Args:
        app: The application inside.
        tracer: Makes the spans.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_api(scope["path"]):
            await self._app(scope, receive, send)
            return
        method, state = scope["method"], scope["state"]
        span = start_request(self._tracer, method, scope["path"], Headers(scope=scope))

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
            await send(message)

        with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                await self._app(scope, receive, send_and_note)
            finally:
                if (route := scope.get("route")) is not None:
                    span.update_name(f"{method} {route.path}")
                    span.set_attribute("http.route", route.path)
                log = state.get("log", {})
                span.set_attribute("askimage.request_id", state["request_id"])
                for name in ("class", "key", "outcome"):
                    if name in log:
                        span.set_attribute(f"askimage.{name}", log[name])
                if (code := log.get("error")) is not None:
                    mark_failed(span, code)
