"""The ASGI application: its parts put together, and what starts and ends with it."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_fastapi_instrumentator import Instrumentator
from starlette.exceptions import HTTPException

from app.engine.gpu import Gpus
from app.engine.service import EngineService
from app.engine.telemetry import Telemetry
from app.errors import ApiError, StatusError, first_validation_error, request_id_of
from app.images.pool import ImagePool
from app.images.store import ImageStore
from app.middleware.body_limit import BodyLimitMiddleware
from app.middleware.priority import PriorityMiddleware
from app.middleware.request_id import RequestIdMiddleware
from app.routers import ask, images, ops
from app.routers.streaming import ClientGone
from app.settings import Settings

PROBES = ["/livez", "/readyz", "/healthz", "/health", "/metrics"]


def create_app(settings: Settings, on_failure: Callable[[str], None]) -> FastAPI:
    """Build the application.

    Args:
        settings: The configuration.
        on_failure: Called with one line when the model cannot be loaded.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, Any]]:
        service = EngineService(settings, Telemetry(Gpus()), on_failure)
        pool = ImagePool(settings.images)
        service.start()
        try:
            yield {
                "settings": settings,
                "service": service,
                "pool": pool,
                "store": ImageStore(settings.images.store_bytes),
            }
        finally:
            pool.close()
            await service.stop()

    app = FastAPI(
        title="askimage",
        summary="Answers questions about images.",
        version=ops.VERSIONS["askimage"] or "unknown",
        lifespan=lifespan,
    )
    for router in (ask.router, images.router, ops.router):
        app.include_router(router)
    Instrumentator(excluded_handlers=PROBES).instrument(app).expose(app, tags=["operations"])
    # The last one added is the outermost.
    app.add_middleware(PriorityMiddleware)
    app.add_middleware(BodyLimitMiddleware, limit=settings.server.max_body_bytes)
    app.add_middleware(RequestIdMiddleware)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(Exception, _bug)
    return app


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response(request_id_of(request))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = StatusError(error.status_code, error.detail).response(request_id_of(request))
    response.headers.update(error.headers or {})
    return response


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return first_validation_error(error.errors()).response(request_id_of(request))


async def _bug(request: Request, error: Exception) -> Response:
    """A fault of ours; the traceback goes to the log, the client learns the request's id."""
    return ApiError("an unexpected error; the log has it under this request's id").response(request_id_of(request))


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; access logs show why there was no answer
