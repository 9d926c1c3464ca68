"""All configuration, one small model per concern, read from `ASKIMAGE_…` variables and `.env`.

Nested names use a double underscore: `ASKIMAGE_SERVER__PORT=9000`. An unknown name is an error that names the nearest
valid one, because a misspelt limit that is silently ignored is found in production.
"""

import difflib
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError as SourceError

PREFIX = "ASKIMAGE_"
DEMO_MODEL = Path(__file__).resolve().parent.parent / "demo_model"

MiB = 1 << 20


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ServerSettings(_Section):
    """The HTTP server."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    operations_port: int | None = Field(
        None, ge=0, le=65535, description="A second port for /metrics and /docs, which then leave the first one."
    )
    docs: bool = Field(True, description="Serve /docs and /openapi.json.")
    metrics: bool = Field(True, description="Serve /metrics.")
    trusted_proxies: int = Field(
        0,
        ge=0,
        le=16,
        description="Proxies in front; the client's address is that far from the right in X-Forwarded-For.",
    )
    max_body_bytes: int = Field(64 * MiB, ge=1, description="Largest request body, in bytes.")
    max_buffered_bytes: int = Field(
        512 * MiB, ge=1, description="All request bodies held at once, in memory and on disk, in bytes."
    )
    body_timeout: float = Field(120.0, gt=0, description="Seconds in which a request body has to arrive.")
    idle_timeout: float = Field(
        15.0, gt=0, description="Seconds a client may neither send the rest of a request nor read a waiting reply."
    )
    drain_timeout: float = Field(
        30.0, ge=0, le=3600, description="Seconds that running requests get to finish at SIGTERM."
    )
    death_grace: float = Field(
        5.0, ge=0, le=3600, description="Seconds between the engine's death and the end of the process (code 70)."
    )


class LogSettings(_Section):
    """What is logged, and how."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level logged.")
    format: Literal["auto", "json", "pretty"] = Field(
        "auto", description="auto: pretty on a terminal, else JSON lines."
    )
    slow_seconds: float = Field(30.0, gt=0, description="Requests that take longer are logged as warnings.")
    questions: bool = Field(False, description="Log questions and answers too; images never are.")


class TracingSettings(_Section):
    """OpenTelemetry traces; off without an endpoint. OpenTelemetry's own `OTEL_…` variables are obeyed too."""

    endpoint: str | None = Field(
        None, pattern="^https?://", description="OTLP over HTTP, such as http://collector:4318/v1/traces."
    )
    sample_ratio: float = Field(
        1.0, ge=0, le=1, description="Share of requests traced whose client did not decide it (traceparent)."
    )


class AuthSettings(_Section):
    """Who may ask. Without keys the service listens on this machine alone, unless `anonymous` is true."""

    key: SecretStr | None = Field(None, description="One key, named `default`, of tier premium.")
    keys_file: Path | None = Field(None, description="File of keys (`askimage keys new`); read again when it changes.")
    anonymous: bool = Field(False, description="Take requests without a key, beside keys or from other machines.")
    anonymous_tier: str | None = Field(
        None, description="Tier of requests without a key; by default premium where there are no keys, else standard."
    )


class LimitSettings(_Section):
    """Rate limits of clients whose key or tier names none; several are separated by `;`."""

    requests: str | None = Field(None, description="Requests, such as `120/minute;2000/hour`; empty: no limit.")
    image_tokens: str | None = Field(None, description="Image tokens, such as `500000/minute`; empty: no limit.")
    storage_url: str | None = Field(
        None, description="`redis://host:port/0`, shared by replicas; empty: this process's memory."
    )
    fail_open: bool = Field(True, description="Let requests through while the storage does not answer; else 503.")


class AdmissionSettings(_Section):
    """Who waits for the engine, how long, and who goes first."""

    max_running: int | None = Field(
        None, ge=1, description="Requests run at once; by default the engine's max_num_seqs."
    )
    reserved_realtime: int | None = Field(
        None, ge=0, description="Of these, slots for realtime alone; by default an eighth."
    )
    batch_beside_realtime: int | None = Field(
        None, ge=1, description="Slots that batch gets while there is realtime traffic; by default a sixteenth."
    )
    max_waiting: int = Field(512, ge=0, description="Most requests that wait, all classes together.")
    max_waiting_realtime: int = Field(128, ge=0, description="Most realtime requests that wait.")
    max_waiting_normal: int = Field(256, ge=0, description="Most normal requests that wait.")
    max_waiting_batch: int = Field(512, ge=0, description="Most batch requests that wait.")
    queue_timeout_realtime: float = Field(10.0, gt=0, description="Longest wait of a realtime request, in seconds.")
    queue_timeout_normal: float = Field(60.0, gt=0, description="Longest wait of a normal request, in seconds.")
    queue_timeout_batch: float = Field(600.0, gt=0, description="Longest wait of a batch request, in seconds.")
    starvation_interval: int = Field(
        8, ge=2, description="Of so many slots given out in a row, one goes to the longest-waiting lower class."
    )


class ModelSettings(_Section):
    """Which checkpoint is served, and how its thinking is marked."""

    path: str = Field(str(DEMO_MODEL), description="Checkpoint folder, or a model name; empty: the demo model.")
    name: str | None = Field(None, description="Name in replies; by default the folder's last part.")
    thinking_open: str = Field("◁think▷", pattern=r"^\S+$", description="Marker that opens the thinking.")
    thinking_close: str = Field("◁/think▷", pattern=r"^\S+$", description="Marker that closes the thinking.")

    @property
    def served_name(self) -> str:
        return self.name or Path(self.path).name


class EngineSettings(_Section):
    """vLLM's engine arguments by their own names; an empty value takes the default for the device found at start."""

    dtype: str = Field("auto", description="Weights and activations: auto, bfloat16, float16 or float32.")
    quantization: str | None = Field(None, description="Weight quantization, such as fp8 or awq.")
    load_format: str = Field("auto", description="How weights are loaded; `dummy` draws random ones (benchmarks).")
    max_model_len: int | None = Field(None, ge=1, description="Longest prompt plus answer, in tokens.")
    max_num_seqs: int | None = Field(None, ge=1, description="Most requests the engine runs at once.")
    max_num_batched_tokens: int | None = Field(None, ge=1, description="Token budget of one engine step.")
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1, description="Share of the device memory taken.")
    kv_cache_memory_bytes: int | None = Field(None, ge=1, description="KV-cache size in bytes (overrides the share).")
    kv_cache_dtype: str = Field("auto", description="KV-cache precision: auto, fp8, …")
    block_size: int | None = Field(None, ge=1, description="Tokens in a KV-cache block.")
    enable_prefix_caching: bool | None = Field(None, description="Reuse the KV cache of equal prompt prefixes.")
    enforce_eager: bool | None = Field(None, description="No compilation and no CUDA graphs.")
    cpu_offload_gb: float = Field(0.0, ge=0, description="GiB of weights per GPU kept in main memory.")
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs that share every layer.")
    pipeline_parallel_size: int = Field(1, ge=1, description="Groups of GPUs that hold consecutive layers.")
    data_parallel_size: int = Field(1, ge=1, description="Engine replicas in this process group.")
    distributed_executor_backend: Literal["mp", "ray", "uni"] | None = Field(
        None, description="Worker processes: mp or ray."
    )
    speculative_config: dict[str, Any] | None = Field(None, description="Speculative decoding, as JSON.")
    compilation_config: dict[str, Any] | None = Field(None, description="torch.compile and CUDA graphs, as JSON.")
    seed: int = Field(0, description="Seed of the engine's random numbers.")
    restarts: int = Field(
        0, ge=0, description="Times a dead engine is started again in this process; then the process ends."
    )
    extra_args: dict[str, Any] = Field(default_factory=dict, description="Any other vLLM engine argument, as JSON.")


class ImageSettings(_Section):
    """What is taken as an image."""

    max_bytes: int = Field(20 * MiB, ge=1, description="Largest image file, in bytes.")
    max_pixels: int = Field(64_000_000, ge=1, description="Largest image, in pixels, checked before decoding.")
    max_per_request: int = Field(8, ge=1, le=64, description="Most images in one request.")
    max_tokens: int | None = Field(
        None, ge=1, description="Most tokens an image may take; larger ones are scaled down."
    )
    workers: int = Field(default_factory=lambda: min(32, os.cpu_count() or 1), ge=1, description="Decoding threads.")
    store_bytes: int = Field(256 * MiB, ge=0, description="Bytes of uploaded images kept for `image_id`.")


class GenerationSettings(_Section):
    """Defaults and bounds of an answer."""

    max_tokens: int = Field(2048, ge=1, description="Tokens of thinking and answer when the request does not say.")
    temperature: float | None = Field(
        None,
        ge=0,
        le=2,
        description="Sampling temperature; by default the checkpoint's generation_config.json, else 0.8.",
    )


class Settings(BaseSettings):
    """The whole configuration of one process."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        env_file=".env",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
    )

    server: ServerSettings = Field(default_factory=ServerSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    tracing: TracingSettings = Field(default_factory=TracingSettings)
    auth: AuthSettings = Field(default_factory=AuthSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
    admission: AdmissionSettings = Field(default_factory=AdmissionSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    images: ImageSettings = Field(default_factory=ImageSettings)
    generation: GenerationSettings = Field(default_factory=GenerationSettings)


class SettingsError(ValueError):
    """The configuration cannot be used; the message names the variable and what it takes."""


def load_settings() -> Settings:
    """Read the environment and `.env`.

    Raises:
        SettingsError: An unknown variable (with the nearest valid name) or a value out of range.
    """
    known = variables()
    for name in os.environ:
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            raise SettingsError(_unknown(name.upper(), known))
    try:
        return Settings()
    except SourceError as error:
        raise SettingsError(f"{error}: {error.__cause__}") from None
    except ValidationError as error:
        first = error.errors()[0]
        name = PREFIX + "__".join(str(part).upper() for part in first["loc"][:2])
        if first["type"] == "extra_forbidden":
            # pydantic-settings reports an unknown line of .env under its own name, in lower case.
            name = str(first["loc"][-1]).upper() if len(first["loc"]) == 1 else name
            raise SettingsError(_unknown(name, known)) from None
        raise SettingsError(f"{name}: {first['msg']} (got {first['input']!r})") from None


def variables() -> dict[str, Any]:
    """Every environment variable the service reads, with its pydantic field."""
    return {
        f"{PREFIX}{section}__{name}".upper(): field
        for section, holder in Settings.model_fields.items()
        for name, field in holder.annotation.model_fields.items()  # type: ignore[union-attr]
    }


def _unknown(name: str, known: dict[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0)
    return f"unknown setting {name}; the nearest valid name is {near[0]}"
