"""The one engine of this process: load, ready, drain, die."""

import asyncio
import contextlib
import enum
import logging
import threading
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from PIL import Image

from app.engine import preflight
from app.engine.adapter import Adapter, load_adapter
from app.engine.arguments import device_type, engine_arguments
from app.engine.generation import Events, Generation
from app.engine.request import GenerationRequest, PreparedImage, Result, Turn
from app.engine.telemetry import Telemetry, stat_logger
from app.engine.thinking import Markers
from app.errors import EngineDead, NotReady
from app.images.intake import DecodedImage
from app.settings import Settings, SettingsError

logger = logging.getLogger(__name__)

HEALTH_CHECK_SECONDS = 0.5
DEFAULT_TEMPERATURE = 0.8  # what Kimi-VL-Thinking's authors recommend


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
        on_failure: Called once with one line when the model cannot be loaded.
    """

    def __init__(self, settings: Settings, telemetry: Telemetry, on_failure: Callable[[str], None]) -> None:
        self.settings = settings
        self.telemetry = telemetry
        self.device = ""
        self.reason = ""
        self._on_failure = on_failure
        self._engine: Any = None
        self._adapter: Adapter | None = None
        self._temperature = DEFAULT_TEMPERATURE
        self._state = EngineState.LOADING
        self._settled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._markers = Markers(settings.model.thinking_open, settings.model.thinking_close)

    @property
    def state(self) -> EngineState:
        return self._state

    def start(self) -> None:
        """Begin to load in the background; `state` tells how far it is."""
        self._set_state(EngineState.LOADING)
        self._task = asyncio.create_task(self._load(), name="engine-load")

    async def settled(self) -> EngineState:
        """Wait until loading is over; the state says how it ended."""
        await self._settled.wait()
        return self._state

    async def stop(self) -> None:
        """Take no more requests and end the engine's processes."""
        if self._state in {EngineState.LOADING, EngineState.READY}:
            self._set_state(EngineState.DRAINING)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._engine is not None:
            await asyncio.to_thread(self._engine.shutdown)

    def require_ready(self) -> Adapter:
        """The adapter of the loaded model.

        Raises:
            NotReady: Loading or draining.
            EngineDead: The engine failed or died.
        """
        if self._state is EngineState.LOADING:
            raise NotReady("the model is still loading; try again shortly", retry_after=5)
        if self._state is EngineState.DRAINING:
            raise NotReady("the service is shutting down; send the request to another replica", retry_after=5)
        if self._state is not EngineState.READY or self._adapter is None:
            raise EngineDead(f"the inference engine is not running: {self.reason}", retry_after=30)
        return self._adapter

    async def generate(self, request: GenerationRequest) -> Events:
        """Take a question in; the iterator gives the deltas as they come, then the result.

        Closing the iterator aborts the engine's work.

        Raises:
            ApiError: The question cannot be answered (see `Generation.prepare` and `require_ready`).
        """
        generation = self._generation(self.require_ready(), request)
        await generation.prepare()
        return self._observed(generation, request)

    async def _observed(self, generation: Generation, request: GenerationRequest) -> Events:
        async with aclosing(generation.run()) as events:
            async for event in events:
                if isinstance(event, Result):
                    self.telemetry.requests.labels(request.priority, event.finish_reason).inc()
                    self._observe(event)
                yield event

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer that the model's context holds; 0 while loading."""
        return int(self._engine.model_config.max_model_len) if self._engine is not None else 0

    def _generation(self, adapter: Adapter, request: GenerationRequest) -> Generation:
        return Generation(
            self._engine,
            adapter,
            request,
            markers=self._markers,
            temperature=self._temperature,
            max_tokens=self.settings.generation.max_tokens,
            context=self.max_model_len,
        )

    def _observe(self, result: Result) -> None:
        timings, telemetry = result.timings, self.telemetry
        telemetry.queue_time.observe(timings.queue_ms / 1e3)
        telemetry.recent_queue_time.add(timings.queue_ms / 1e3)
        telemetry.prefill.observe(timings.prefill_ms / 1e3)
        telemetry.decode.observe(timings.decode_ms / 1e3)
        telemetry.time_to_first_token.observe(timings.ttft_ms / 1e3)
        telemetry.request_seconds.observe(timings.total_ms / 1e3)
        for kind in ("prompt", "image", "cached", "reasoning", "completion"):
            telemetry.tokens.labels(kind).inc(getattr(result.usage, f"{kind}_tokens"))

    async def _load(self) -> None:
        began = time.monotonic()
        try:
            await _in_daemon_thread(self._build)
            await self._warm_up()
        except (preflight.ModelUnusable, SettingsError) as error:
            self._fail(str(error))
        except Exception as error:
            logger.debug("engine start failed", exc_info=True)
            self._fail(f"the engine could not start: {_root_cause(error)}")
        else:
            self._set_state(EngineState.READY)
            logger.info(
                "ready: model %s on %s, context %d tokens, loaded in %.1f s",
                self.settings.model.served_name,
                self.device,
                self.max_model_len,
                time.monotonic() - began,
            )
            await self._watch()

    def _build(self) -> None:
        """Everything that blocks: imports, checks, the engine's processes, tokenizer."""
        checkpoint = preflight.inspect_checkpoint(self.settings.model.path)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.engine.async_llm_engine import AsyncLLMEngine

        self.device = device_type()
        arguments = engine_arguments(self.settings, self.device)
        if checkpoint is not None:
            preflight.check_architecture(checkpoint)
            preflight.check_memory(checkpoint, arguments, self.device, self.telemetry.gpus)
        config = AsyncEngineArgs(**arguments).create_engine_config()
        if not config.model_config.is_multimodal_model:
            raise preflight.ModelUnusable(f"model {self.settings.model.path} takes no images")
        self._temperature = self._default_temperature(config.model_config)
        self._engine = AsyncLLMEngine.from_vllm_config(config, stat_loggers=[stat_logger(self.telemetry)])
        self._adapter = load_adapter(self._engine, self.settings.images.max_tokens)

    def _default_temperature(self, model_config: Any) -> float:
        if self.settings.generation.temperature is not None:
            return self.settings.generation.temperature
        generation = model_config.try_get_generation_config()
        if generation.get("do_sample") is False:
            return 0.0
        return float(generation.get("temperature", DEFAULT_TEMPERATURE))

    async def _warm_up(self) -> None:
        """One picture through the whole path, so that no user pays for first-time work."""
        assert self._adapter is not None
        picture = DecodedImage(id="warm-up", format="PNG", pixels=Image.new("RGB", (224, 224), "white"), frames=1)
        image: PreparedImage = await asyncio.to_thread(self._adapter.prepare, picture)
        request = GenerationRequest(
            id="warm-up",
            turns=(Turn("user", "What is this?", images=1),),
            images=(image,),
            max_tokens=2,
            arrived=time.monotonic(),
        )
        generation = self._generation(self._adapter, request)
        await generation.prepare()
        async for _ in generation.run():
            pass

    async def _watch(self) -> None:
        while not self._engine.errored:  # noqa: ASYNC110 (vLLM has a flag, no event)
            await asyncio.sleep(HEALTH_CHECK_SECONDS)
        self.reason = "the engine process ended"
        self._set_state(EngineState.DEAD)
        logger.error("the inference engine has died; restart the service")

    def _fail(self, reason: str) -> None:
        self.reason = reason
        self._set_state(EngineState.FAILED)
        self._on_failure(reason)

    def _set_state(self, state: EngineState) -> None:
        self._state = state
        if state is not EngineState.LOADING:
            self._settled.set()
        for each in EngineState:
            self.telemetry.state.labels(each.value).set(each is state)


async def _in_daemon_thread(work: Callable[[], None]) -> None:
    """Like `asyncio.to_thread`, but neither the loop's end nor the interpreter's waits for it: a service that is
    stopped while a model loads ends at once."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=run, name="engine-load", daemon=True).start()
    await done


def _root_cause(error: BaseException) -> str:
    """The innermost message, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()) or type(error).__name__
