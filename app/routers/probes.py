"""Probes for Kubernetes. They never wait for the engine."""

from fastapi import APIRouter
from fastapi.responses import RedirectResponse

from app.deps import ServiceDep, SettingsDep
from app.errors import EngineDead, NotReady, responses

router = APIRouter(tags=["operations"])


@router.head("/livez", include_in_schema=False)
@router.get("/livez", responses=responses(EngineDead))
@router.head("/healthz", include_in_schema=False)
@router.get("/healthz", responses=responses(EngineDead))
async def live(service: ServiceDep) -> dict[str, str]:
    """200 unless the engine is dead or failed: restarting the process would help."""
    if not service.alive:
        service.require_ready()
    return {"status": "alive", "state": service.state}


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", responses=responses(NotReady, EngineDead))
async def ready(service: ServiceDep) -> dict[str, str]:
    """200 only when the model is loaded, warmed, and the service is not draining."""
    service.require_ready()
    return {"status": "ready", "state": service.state}


@router.get("/", include_in_schema=False)
async def index(settings: SettingsDep) -> RedirectResponse:
    """People who open the service in a browser see what it can do."""
    return RedirectResponse("/docs" if settings.server.docs else "/health")
