"""The one engine of this process: load, ready, drain, die."""

import asyncio
import contextlib
import enum
import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from app.engine.adapter import Adapter
from app.engine.admission import AdmissionController
from app.engine.arguments import GiB
from app.engine.generation import Generation
from app.engine.inflight import InFlight
from app.engine.loading import LoadedEngine, load_engine, root_cause, warm_up_request
from app.engine.preflight import ModelUnusable
from app.engine.request import GenerationRequest
from app.engine.telemetry import Telemetry
from app.engine.thinking import Markers
from app.errors import ApiError, Draining, EngineDead, NotReady
from app.settings import Settings, SettingsError
from app.threads import in_daemon_thread
from app.versions import VERSIONS

logger = logging.getLogger(__name__)

HEALTH_CHECK_SECONDS = 0.25
LAST_WORDS_SECONDS = 2.0  # for requests that were interrupted to send their error
LONGEST_BACKOFF_SECONDS = 30.0

EXIT_FAILED = 1
EXIT_DEAD = 70  # sysexits.h: internal software error; a supervisor restarts the process


class EngineState(enum.StrEnum):
    """Life of the engine; `failed` never was ready, `dead` no longer is."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    DEAD = "dead"


class EngineService:
    """Owns vLLM's `AsyncLLMEngine`.

    Args:
        settings: The service's configuration.
        telemetry: Where engine and requests are measured.
        on_end: Called once when the process has no more use, with its exit code and one line: the model cannot be
            loaded, or the engine died.
    """

    def __init__(self, settings: Settings, telemetry: Telemetry, on_end: Callable[[int, str], None]) -> None:
        self.settings = settings
        self.telemetry = telemetry
        self.admission = AdmissionController(settings.admission)
        self.reason = ""
        self._on_end = on_end
        self._loaded: LoadedEngine | None = None
        self._state = EngineState.LOADING
        self._task: asyncio.Task[None] | None = None
        self._markers = Markers(settings.model.thinking_open, settings.model.thinking_close)
        self._settled = asyncio.Event()
        self._inflight: set[InFlight] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def alive(self) -> bool:
        """False when only another process can help."""
        return self._state not in {EngineState.DEAD, EngineState.FAILED}

    @property
    def device(self) -> str:
        """`cpu`, `cuda`, …; empty while loading."""
        return self._loaded.device if self._loaded is not None else ""

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer that the model's context holds; 0 while loading."""
        return self._loaded.max_model_len if self._loaded is not None else 0

    def start(self) -> None:
        """Begin to load in the background; `state` tells how far it is."""
        self._set_state(EngineState.LOADING)
        self._task = asyncio.create_task(self._live(), name="engine")

    async def settled(self) -> EngineState:
        """Wait until loading is over; the state says how it ended."""
        await self._settled.wait()
        return self._state

    async def drain(self) -> None:
        """Take no more questions and let those that were taken finish, for `server.drain_timeout` at most; then they
        end with an error."""
        if self._state is EngineState.READY:
            self._set_state(EngineState.DRAINING)
            self.telemetry.drains.inc()
            timeout = self.settings.server.drain_timeout
            logger.info("draining: %d requests have %g s to finish", len(self._inflight), timeout)
            if not await self._idle_within(timeout):
                logger.warning("drain timeout: %d requests are cut short", len(self._inflight))
                self._interrupt_all(Draining("the service shut down before the answer was complete", retry_after=1))
        await self._idle_within(LAST_WORDS_SECONDS)

    async def stop(self) -> None:
        """End the engine's processes."""
        if self._state in {EngineState.LOADING, EngineState.READY}:
            self._set_state(EngineState.DRAINING)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._unload()

    def require_ready(self) -> Adapter:
        """The adapter of the loaded model.

        Raises:
            NotReady: Still loading.
            Draining: Shutting down.
            EngineDead: The engine failed or died.
        """
        if self._state is EngineState.LOADING:
            raise NotReady("the model is still loading; try again shortly", retry_after=5)
        if self._state is EngineState.DRAINING:
            raise Draining("the service is shutting down; send the request to another replica", retry_after=1)
        if self._state is not EngineState.READY or self._loaded is None or self._loaded.engine.errored:
            raise EngineDead(f"the inference engine is not running: {self.reason or 'it just ended'}", retry_after=30)
        return self._loaded.adapter

    @contextmanager
    def tracked(self, inflight: InFlight) -> Iterator[Adapter]:
        """A request that a drain waits for, and that ends when the engine does; gives the model's adapter.

        Raises:
            ApiError: See `require_ready`.
        """
        adapter = self.require_ready()
        self._inflight.add(inflight)
        self._idle.clear()
        try:
            yield adapter
        finally:
            self._inflight.discard(inflight)
            if not self._inflight:
                self._idle.set()

    async def prepare(self, request: GenerationRequest) -> Generation:
        """Make a question ready for the engine, whose work begins when the generation is run.

        Raises:
            ApiError: The question cannot be answered, see `Generation.prepare`.
        """
        loaded = self._loaded
        if loaded is None:  # tracked requests are interrupted when it goes
            raise EngineDead("the inference engine is not running", retry_after=30)
        return await self._prepare(loaded, request)

    async def _prepare(self, loaded: LoadedEngine, request: GenerationRequest) -> Generation:
        generation = Generation(
            loaded.engine,
            loaded.adapter,
            request,
            markers=self._markers,
            temperature=loaded.temperature,
            max_tokens=self.settings.generation.max_tokens,
            context=loaded.max_model_len,
        )
        await generation.prepare()
        self.telemetry.encoder_queries.inc(len(request.images))
        return generation

    async def _live(self) -> None:
        """Load, watch, and load again as often as `engine.restarts` allows."""
        restarts = self.settings.engine.restarts
        for attempt in range(restarts + 1):
            try:
                loaded = await self._load()
            except Exception as error:
                known = isinstance(error, (ModelUnusable, SettingsError))
                logger.debug("engine start failed", exc_info=True)
                self.reason = str(error) if known else f"the engine could not start: {root_cause(error)}"
                if attempt == 0:
                    self._set_state(EngineState.FAILED)
                    self._on_end(EXIT_FAILED, self.reason)
                    return
            else:
                await self._watch(loaded)
                self.reason = "the engine process ended"
            if attempt == restarts or self._state is EngineState.DRAINING:
                break
            await self._restart(attempt)
        await self._die()

    async def _load(self) -> LoadedEngine:
        began = time.monotonic()
        self._loaded = loaded = await in_daemon_thread(lambda: load_engine(self.settings, self.telemetry))
        warm_up = await self._prepare(loaded, await warm_up_request(loaded.adapter))
        async for _ in warm_up.run():
            pass
        # What was loaded is no garbage: looking through it again held the event loop for half a second under load.
        gc.collect()
        gc.freeze()
        self.admission.open(loaded.max_num_seqs)
        self.telemetry.describe(self.settings.model.served_name, loaded)
        self._set_state(EngineState.READY)
        logger.info("ready", extra=self._summary(loaded) | {"load_seconds": round(time.monotonic() - began, 1)})
        return loaded

    def _summary(self, loaded: LoadedEngine) -> dict[str, Any]:
        """What an operator wants to know of a service that has started."""
        telemetry, settings = self.telemetry, self.settings
        return {
            "model": settings.model.served_name,
            "device": loaded.device,
            "gpus": [
                f"{gpu.name} {gpu.memory_used_bytes / GiB:.1f} of {gpu.memory_total_bytes / GiB:.1f} GiB"
                for gpu in telemetry.gpus.latest
            ],
            "memory_gib": {name: round(size / GiB, 1) for name, size in telemetry.memory.items()},
            "kv_cache_tokens": loaded.kv_cache_tokens,
            "max_model_len": loaded.max_model_len,
            "slots": self.admission.capacity,
            "realtime_slots": self.admission.reserved,
            "limits": {
                "requests": settings.limits.requests,
                "image_tokens": settings.limits.image_tokens,
                "max_body_bytes": settings.server.max_body_bytes,
                "max_pixels": settings.images.max_pixels,
                "max_tokens": settings.generation.max_tokens,
            },
            "versions": VERSIONS,
        }

    async def _watch(self, loaded: LoadedEngine) -> None:
        while not loaded.engine.errored:  # noqa: ASYNC110 (vLLM has a flag, no event)
            await asyncio.sleep(HEALTH_CHECK_SECONDS)

    async def _restart(self, attempt: int) -> None:
        pause = min(LONGEST_BACKOFF_SECONDS, 2.0**attempt)
        logger.error(
            "%s; starting it again in %g s (%d of %d)", self.reason, pause, attempt + 1, self.settings.engine.restarts
        )
        self.telemetry.restarts.inc()
        self._set_state(EngineState.LOADING)
        self._interrupt_all(EngineDead("the inference engine has ended; it is being started again", retry_after=30))
        await self._unload()
        await asyncio.sleep(pause)

    async def _die(self) -> None:
        self._set_state(EngineState.DEAD)
        self._interrupt_all(EngineDead("the inference engine has ended; the service is restarting", retry_after=30))
        grace = self.settings.server.death_grace
        logger.error("the inference engine has died (%s); the process ends in %g s", self.reason, grace)
        try:
            await asyncio.sleep(grace)
        finally:  # a signal may end the process before
            self._on_end(EXIT_DEAD, f"the inference engine has died: {self.reason}")

    async def _unload(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            await asyncio.to_thread(loaded.engine.shutdown)

    def _interrupt_all(self, error: ApiError) -> None:
        for each in list(self._inflight):
            each.interrupt(error)

    async def _idle_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        return self._idle.is_set()

    def _set_state(self, state: EngineState) -> None:
        self._state = state
        if state is not EngineState.LOADING:
            self._settled.set()
        for each in EngineState:
            self.telemetry.state.labels(each.value).set(each is state)
