"""`/health`: what the service is doing, for people and dashboards."""

import time
from dataclasses import asdict

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from app.deps import ServiceDep
from app.engine.request import PriorityClass
from app.engine.service import EngineState
from app.versions import VERSIONS

router = APIRouter(tags=["operations"])

_STARTED = time.monotonic()


class Gpu(BaseModel):
    """A GPU of this machine, by NVML; a figure that it does not tell is null."""

    index: int = Field(description="Its NVML index; the label `gpu` of the series.")
    name: str = Field(description="Product name.")
    memory_used_bytes: int = Field(description="`askimage_gpu_memory_used_bytes`: in use, by all processes.")
    memory_total_bytes: int = Field(description="`askimage_gpu_memory_total_bytes`.")
    utilization_ratio: float | None = Field(description="`askimage_gpu_utilization_ratio`: busy of late, 0-1.")
    temperature_celsius: float | None = Field(description="`askimage_gpu_temperature_celsius`.")
    power_watts: float | None = Field(description="`askimage_gpu_power_watts`.")
    ecc_errors: int | None = Field(
        description="`askimage_gpu_ecc_errors_total`: uncorrected, since the driver's start."
    )
    xid_errors: int | None = Field(description="`askimage_gpu_xid_errors_total`: since the service's start.")


class Memory(BaseModel):
    """Main memory held, in bytes: `askimage_memory_bytes`."""

    service: int = Field(description="By this process.")
    engine: int = Field(description="By the engine's processes.")


class Requests(BaseModel):
    """Questions under way."""

    running: int = Field(description="`askimage_running`: in the engine's steps.")
    waiting: dict[PriorityClass, int] = Field(description="`askimage_waiting`: for a slot, by class.")
    waiting_in_engine: int = Field(description="`askimage_engine_waiting`: have a slot, and not yet a first step.")


class TokensPerSecond(BaseModel):
    """`askimage_tokens_per_second`, over 10 s."""

    prompt: float = Field(description="Read, images included.")
    generation: float = Field(description="Written.")


class KvCache(BaseModel):
    """The engine's cache of what it has read and written."""

    usage_ratio: float = Field(description="`askimage_kv_cache_usage_ratio`: in use, 0-1, of the fullest engine.")
    tokens: int | None = Field(description="`askimage_kv_cache_tokens`: that it holds; null while loading.")
    bytes: int | None = Field(description="`askimage_kv_cache_bytes`: its size; null where the engine measures it.")


class Health(BaseModel):
    """Each figure is read where its series on `/metrics` is read."""

    state: EngineState = Field(description="`askimage_engine_state`.")
    reason: str | None = Field(description="Why it failed or died.")
    model: str = Field(description="Name of the model.")
    device: str | None = Field(description="cpu, cuda, …; null while loading.")
    gpus: list[Gpu] = Field(description="Empty on a machine without.")
    memory: Memory | None = Field(description="Null while it cannot be read.")
    requests: Requests
    queue_time_seconds: float = Field(description="`askimage_queue_time_recent_seconds`: mean wait, over 10 s.")
    tokens_per_second: TokensPerSecond
    kv_cache: KvCache
    max_model_len: int | None = Field(description="Tokens of prompt and answer that the context holds.")
    uptime_seconds: float = Field(description="Since the process began to serve.")
    versions: dict[str, str] = Field(description="`askimage_build_info`.")


@router.get("/health", responses={503: {"model": Health, "description": "The engine is dead or failed."}})
async def health(service: ServiceDep, response: Response) -> Health:
    """State and load. 503 only when the engine is dead or failed."""
    now = service.telemetry
    if not service.alive:
        response.status_code = 503
    return Health(
        state=service.state,
        reason=service.reason or None,
        model=service.settings.model.served_name,
        device=service.device or None,
        gpus=[Gpu(**asdict(reading)) for reading in now.gpus.latest],
        memory=Memory(**now.memory) if now.memory else None,
        requests=Requests(running=now.running, waiting=now.waiting_for_slot, waiting_in_engine=now.waiting),
        queue_time_seconds=now.recent_queue_time.mean(),
        tokens_per_second=TokensPerSecond(**now.tokens_per_second),
        kv_cache=KvCache(usage_ratio=now.kv_cache_usage, tokens=now.kv_cache_tokens, bytes=now.kv_cache_bytes),
        max_model_len=service.max_model_len or None,
        uptime_seconds=round(time.monotonic() - _STARTED, 1),
        versions=VERSIONS,
    )
