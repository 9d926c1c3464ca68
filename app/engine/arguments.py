"""From typed settings to vLLM's engine arguments, with defaults for the device found at start."""

import dataclasses
import difflib
import logging
from typing import Any

from app.settings import EngineSettings, Settings, SettingsError

logger = logging.getLogger(__name__)

GiB = 1 << 30

# vLLM's CPU kernel for interleaved rotary embeddings gives wrong answers in eager mode for models with more than one
# head; PyTorch's own operations are right and cost little at this size.
_CPU_COMPILATION = {"custom_ops": ["all", "-rotary_embedding"]}

DEVICE_DEFAULTS: dict[str, dict[str, Any]] = {
    # Eager: starts in a third of the time. One GiB of KV cache holds 200,000 tokens of the demo model.
    "cpu": {
        "enforce_eager": True,
        "compilation_config": _CPU_COMPILATION,
        "kv_cache_memory_bytes": GiB,
        "max_model_len": 8192,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 32,
    },
    # vLLM's default of 2048 for embedding applications refuses images of more tokens and batches few of them.
    "cuda": {"max_num_batched_tokens": 16384, "max_num_seqs": 256},
}

# The service decides these; a second opinion in extra_args would be overruled without a word.
_RESERVED = {
    "model",
    "served_model_name",
    "limit_mm_per_prompt",
    "scheduling_policy",
    "trust_remote_code",
    "otlp_traces_endpoint",
}


def device_type() -> str:
    """`cpu`, `cuda`, … as vLLM sees this machine."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def engine_arguments(settings: Settings, device: str) -> dict[str, Any]:
    """Keyword arguments for vLLM's `AsyncEngineArgs`.

    Order of precedence: `engine.extra_args`, the typed engine settings, the device's defaults.

    Raises:
        SettingsError: `engine.extra_args` has a name vLLM does not know (with the nearest valid one), or one that the
            service sets itself.
    """
    check_extra_args(settings.engine)
    defaults = dict(DEVICE_DEFAULTS.get(device, {}))
    chosen = {
        name: value
        for name, value in settings.engine.model_dump(exclude={"extra_args", "restarts"}).items()
        if value is not None
    }
    if device == "cpu" and chosen.get("enforce_eager") is False:
        defaults.pop("compilation_config", None)  # the compiled rotary embedding is right
    taken = {name: value for name, value in defaults.items() if name not in chosen | settings.engine.extra_args}
    if taken:
        logger.info("defaults for device %s: %s", device, ", ".join(f"{k}={v}" for k, v in taken.items()))
    return {
        # Compact JSON: with free white space, small models can pad an object for ever.
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        **defaults,
        **chosen,
        **settings.engine.extra_args,
        "model": settings.model.path,
        "served_model_name": settings.model.served_name,
        "limit_mm_per_prompt": {"image": settings.images.max_per_request},
        "scheduling_policy": "priority",
        "trust_remote_code": False,
        "use_tqdm_on_load": False,
        "otlp_traces_endpoint": settings.tracing.endpoint,
        "enable_logging_iteration_details": True,  # how many images the encoder worked on
    }


def check_extra_args(engine: EngineSettings) -> None:
    """Refuse names in `engine.extra_args` that would do nothing."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)} - _RESERVED
    for name in engine.extra_args:
        if name in _RESERVED:
            raise SettingsError(f"ASKIMAGE_ENGINE__EXTRA_ARGS: {name!r} is set by the service and cannot be given here")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
            raise SettingsError(
                f"ASKIMAGE_ENGINE__EXTRA_ARGS: vLLM has no engine argument {name!r}; the nearest valid name is {near!r}"
            )
