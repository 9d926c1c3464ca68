"""Build the engine: everything that blocks, on a thread that nobody has to wait for."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from PIL import Image

from app.engine import preflight
from app.engine.adapter import Adapter, load_adapter
from app.engine.arguments import device_type, engine_arguments
from app.engine.request import GenerationRequest, PreparedImage, Turn
from app.engine.telemetry import Telemetry, stat_logger
from app.images.intake import DecodedImage
from app.settings import Settings

DEFAULT_TEMPERATURE = 0.8  # what Kimi-VL-Thinking's authors recommend


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A model that can answer.

    Attributes:
        engine: vLLM's `AsyncLLMEngine`.
        adapter: Prompts and images for its model.
        device: `cpu`, `cuda`, …
        temperature: Where a request names none.
        max_model_len: Tokens of prompt and answer that the context holds.
        max_num_seqs: Requests it runs at once, all data-parallel replicas together.
        kv_cache_tokens: Tokens that the KV cache of one replica holds.
        kv_cache_bytes: Its size, where it is set; else vLLM takes what is free.
    """

    engine: Any
    adapter: Adapter
    device: str
    temperature: float
    max_model_len: int
    max_num_seqs: int
    kv_cache_tokens: int
    kv_cache_bytes: int | None


def load_engine(settings: Settings, telemetry: Telemetry) -> LoadedEngine:
    """Check the checkpoint, start the engine's processes, make the tokenizer. Takes seconds to minutes.

    Raises:
        ModelUnusable, SettingsError: With one line that says what to change.
        Exception: Whatever vLLM raises.
    """
    checkpoint = preflight.inspect_checkpoint(settings.model.path)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.async_llm_engine import AsyncLLMEngine

    device = device_type()
    arguments = engine_arguments(settings, device)
    if checkpoint is not None:
        preflight.check_architecture(checkpoint)
        preflight.check_memory(checkpoint, arguments, device, telemetry.gpus.latest)
    config = AsyncEngineArgs(**arguments).create_engine_config()
    if not config.model_config.is_multimodal_model:
        raise preflight.ModelUnusable(f"model {settings.model.path} takes no images")
    engine = AsyncLLMEngine.from_vllm_config(config, stat_loggers=[stat_logger(telemetry)])
    return LoadedEngine(
        engine=engine,
        adapter=load_adapter(engine, settings.images.max_tokens),
        device=device,
        temperature=_default_temperature(settings, config.model_config),
        max_model_len=int(config.model_config.max_model_len),
        max_num_seqs=config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size,
        kv_cache_tokens=int(config.cache_config.kv_cache_size_tokens),
        kv_cache_bytes=config.cache_config.kv_cache_memory_bytes,
    )


def _default_temperature(settings: Settings, model_config: Any) -> float:
    if settings.generation.temperature is not None:
        return settings.generation.temperature
    generation = model_config.try_get_generation_config()
    if generation.get("do_sample") is False:
        return 0.0
    return float(generation.get("temperature", DEFAULT_TEMPERATURE))


async def warm_up_request(adapter: Adapter) -> GenerationRequest:
    """One picture for the whole path, so that no user pays for first-time work."""
    picture = DecodedImage(id="warm-up", format="PNG", pixels=Image.new("RGB", (224, 224), "white"), frames=1)
    image: PreparedImage = await asyncio.to_thread(adapter.prepare, picture)
    return GenerationRequest(
        id="warm-up",
        turns=(Turn("user", "What is this?", images=1),),
        images=(image,),
        max_tokens=2,
        arrived=time.monotonic(),
    )


def root_cause(error: BaseException) -> str:
    """The innermost message, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()) or type(error).__name__
