"""The ASGI application: its parts put together, and what starts and ends with it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_fastapi_instrumentator import Instrumentator
from starlette.exceptions import HTTPException

from app.answering import Answering
from app.engine.gpu import Gpus
from app.engine.inflight import Phase
from app.engine.service import EngineService
from app.engine.telemetry import Telemetry
from app.errors import ApiError, StatusError, first_validation_error
from app.images.pool import ImagePool
from app.images.store import ImageStore
from app.images.telemetry import ImageTelemetry
from app.keys import KeyStore
from app.loop_lag import measure_loop_lag
from app.middleware.access_log import AccessLogMiddleware
from app.middleware.auth import AuthMiddleware
from app.middleware.body_limit import BodyLimitMiddleware
from app.middleware.operations_port import PROBES, OperationsPortMiddleware
from app.middleware.pace import PaceMiddleware
from app.middleware.priority import PriorityMiddleware
from app.middleware.rate_limit import RateLimitMiddleware
from app.middleware.request_id import RequestIdMiddleware
from app.middleware.shed import ShedMiddleware
from app.middleware.trace import TraceMiddleware
from app.rate_limits import RateLimiter
from app.routers import ask, health, images, metrics, probes
from app.routers.streaming import ClientGone
from app.settings import Settings
from app.tracing import Tracing
from app.versions import VERSIONS


def create_app(settings: Settings, keys: KeyStore, on_end: Callable[[int, str], None]) -> FastAPI:
    """Build the application.

    Args:
        settings: The configuration.
        keys: Who may ask.
        on_end: Called with an exit code and one line when the process should end, see `EngineService`.

    Raises:
        SettingsError: Limits or tracing that cannot be used.
    """
    limiter = RateLimiter(settings.limits)
    tracing = Tracing(settings.tracing)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, Any]]:
        telemetry = Telemetry(Gpus())
        service = EngineService(settings, telemetry, on_end)
        pool = ImagePool(settings.images, ImageTelemetry())
        telemetry.start(service.admission, pool)
        service.start()
        background = [asyncio.create_task(keys.watch()), asyncio.create_task(measure_loop_lag(telemetry.loop_lag))]
        try:
            yield {
                "settings": settings,
                "keys": keys,
                "rate_limiter": limiter,
                "service": service,
                "pool": pool,
                "answering": Answering(service, pool, limiter, tracing.tracer),
                "tracer": tracing.tracer,
                "store": ImageStore(settings.images.store_bytes),
            }
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            pool.close()
            await service.stop()
            await limiter.close()
            telemetry.stop()
            await tracing.close()

    app = FastAPI(
        title="askimage",
        summary="Answers questions about images.",
        version=VERSIONS["askimage"],
        lifespan=lifespan,
        openapi_url="/openapi.json" if settings.server.docs else None,
    )
    for each in (ask, images, probes, health) + ((metrics,) if settings.server.metrics else ()):
        app.include_router(each.router)
    _add_middleware(app, settings, tracing)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(Exception, _bug)
    return app


def _add_middleware(app: FastAPI, settings: Settings, tracing: Tracing) -> None:
    """The last one added is the outermost: what counts and logs sees what the others refuse."""
    app.add_middleware(ShedMiddleware)
    app.add_middleware(PriorityMiddleware)
    app.add_middleware(RateLimitMiddleware)
    app.add_middleware(AuthMiddleware, trusted_proxies=settings.server.trusted_proxies)
    app.add_middleware(BodyLimitMiddleware, settings=settings.server)
    if settings.server.operations_port is not None:
        app.add_middleware(OperationsPortMiddleware, port=settings.server.operations_port)
    app.add_middleware(AccessLogMiddleware, slow_seconds=settings.log.slow_seconds)
    app.add_middleware(TraceMiddleware, tracer=tracing.tracer)
    app.add_middleware(RequestIdMiddleware)
    Instrumentator(excluded_handlers=[*PROBES, "/metrics"]).instrument(app)
    app.add_middleware(PaceMiddleware)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response(request.scope)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = StatusError(error.status_code, error.detail).response(request.scope)
    response.headers.update(error.headers or {})
    return response


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return first_validation_error(error.errors()).response(request.scope)


async def _bug(request: Request, error: Exception) -> Response:
    """A fault of ours; the traceback goes to the log, the client learns the request's id."""
    response = ApiError("an unexpected error; the log has it under this request's id").response(request.scope)
    response.headers["X-Request-ID"] = request.state.request_id  # this is outside of the middleware that sets it
    return response


async def _client_gone(request: Request, error: Exception) -> Response:
    """Nobody reads the reply; access logs show why there was no answer."""
    if "outcome" not in request.state.log:
        request.state.log |= {"outcome": "cancelled", "phase": str(Phase.UPLOAD)}
        request.state.service.telemetry.cancellations.labels(Phase.UPLOAD).inc()
    return Response(status_code=499)
