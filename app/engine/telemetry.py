"""What the service measures: Prometheus series and the figures that `/health` shows.

Both read the same objects, so that a figure on `/health` always equals its series.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from app.engine.admission import CLASSES, AdmissionController
from app.engine.gauges import LiveGauges
from app.engine.gpu import GpuReading, Gpus
from app.engine.inflight import Phase
from app.engine.request import GenerationRequest, Result
from app.engine.sampled import Sampled, resident_memory
from app.errors import error_codes
from app.identity import QUESTION_ROUTES
from app.images.pool import ImagePool
from app.tracing import current_trace_id
from app.versions import VERSIONS

if TYPE_CHECKING:
    from app.engine.loading import LoadedEngine

# Seconds: from a cached first token on a GPU to a long queue on a busy machine.
LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
LAG_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1)
SIZE_BUCKETS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
WINDOW_SECONDS = 10.0
LONGEST_EXEMPLAR = 64  # OpenMetrics allows 128 characters of names and values, a trace's id among them
COMMON_OUTCOMES = ("stop", "length", "cancelled", "internal_error", "engine_error", "engine_dead")
TOKEN_KINDS = ("prompt", "image", "cached", "reasoning", "answer")


class Window:
    """Sum and mean of what was observed over the last `WINDOW_SECONDS`.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._observed: deque[tuple[float, float]] = deque()

    def add(self, value: float) -> None:
        self._forget()
        self._observed.append((self._clock(), value))

    def per_second(self) -> float:
        self._forget()
        return sum(value for _, value in self._observed) / WINDOW_SECONDS

    def mean(self) -> float:
        """0 when nothing was observed."""
        self._forget()
        return sum(value for _, value in self._observed) / max(1, len(self._observed))

    def _forget(self) -> None:
        oldest = self._clock() - WINDOW_SECONDS
        while self._observed and self._observed[0][0] <= oldest:
            self._observed.popleft()


class Telemetry:
    """Series of one service, and the engine's latest state.

    Args:
        gpus: Devices that are reported.
        registry: Where the series are registered; vLLM registers its own in the default one.

    Attributes:
        kv_cache_tokens: See `LoadedEngine`; None before it is loaded.
        kv_cache_bytes: See `LoadedEngine`.
    """

    def __init__(self, gpus: Gpus, registry: CollectorRegistry = REGISTRY) -> None:
        self.gpus = Sampled[list[GpuReading]](gpus.readings, stale=[])
        self.admission: AdmissionController | None = None
        self.pool: ImagePool | None = None
        self.kv_cache_tokens: int | None = None
        self.kv_cache_bytes: int | None = None
        self._gpus = gpus
        self._memory = Sampled[dict[str, int]](resident_memory, stale={})
        self._engines: dict[int, Any] = {}
        self.prompt_rate = Window()
        self.generation_rate = Window()
        self.recent_queue_time = Window()

        def counter(name: str, text: str, labels: Mapping[str, Iterable[str]] | None = None) -> Counter:
            labels = labels or {}
            family = Counter(f"askimage_{name}", text, labels, registry=registry)
            if len(labels) == 1:  # from the start there is a zero to count from, as alerts need it
                for value in next(iter(labels.values())):
                    family.labels(value)
            return family

        def seconds(name: str, text: str, *labels: str, buckets: Sequence[float] = LATENCY_BUCKETS) -> Histogram:
            return Histogram(f"askimage_{name}_seconds", text, labels, buckets=buckets, registry=registry)

        self.requests = counter(
            "requests",
            "Questions by how they ended: a finish reason, an error code, or cancelled by the client.",
            {"route": (), "class": (), "outcome": ()},
        )
        self.rejections = counter("rejections", "Requests turned away, by error code.", {"reason": error_codes()})
        self.cancellations = counter("cancellations", "Clients that left, by how far they were.", {"phase": Phase})
        self.drains = counter("drains", "Shutdowns that let running requests finish.")
        self.restarts = counter("engine_restarts", "Starts of a new engine after the old one died.")
        self.tokens = counter(
            "tokens",
            "Tokens of answered questions by kind; image and cached ones are prompt tokens too.",
            {"kind": TOKEN_KINDS},
        )
        self.prefix_cache_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.prefix_cache_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.encoder_queries = counter("encoder_queries", "Images given to the engine.")
        self.encoder_runs = counter("encoder_runs", "Images that the vision encoder worked on; the others were cached.")
        self.preprocess = seconds("preprocess", "Decoding and patching the images of a request.", "class")
        self.queue_time = seconds(
            "queue_time",
            "Waiting for a slot (admission), then in the engine for the first step (engine).",
            "stage",
            "class",
        )
        self.prefill = seconds("prefill", "From the first prefill step to the first token.", "class")
        self.decode = seconds("decode", "From the first token to the last.", "class")
        self.time_to_first_token = seconds(
            "time_to_first_token", "From the request's arrival to its first token.", "class"
        )
        self.time_per_output_token = seconds(
            "time_per_output_token", "Mean time between two tokens of an answer.", "class", buckets=TOKEN_BUCKETS
        )
        self.request_seconds = seconds("request", "From the request's arrival to the end of its answer.", "class")
        self.loop_lag = seconds(
            "event_loop_lag", "How much later than asked a sleeping task woke up.", buckets=LAG_BUCKETS
        )
        self.image_tokens = Histogram(
            "askimage_image_tokens", "Tokens of one image.", buckets=SIZE_BUCKETS, registry=registry
        )
        self.state = Gauge("askimage_engine_state", "1 for the engine's current state.", ["state"], registry=registry)
        self.build = Gauge(
            "askimage_build_info",
            "Versions, model and device.",
            [*VERSIONS, "model", "device"],
            registry=registry,
        )
        for route, each, outcome in itertools.product(QUESTION_ROUTES, CLASSES, COMMON_OUTCOMES):
            self.requests.labels(route, each, outcome)
        for each in CLASSES:
            for family in (self.preprocess, self.prefill, self.decode, self.time_to_first_token):
                family.labels(each)
            for family in (self.time_per_output_token, self.request_seconds):
                family.labels(each)
            for stage in ("admission", "engine"):
                self.queue_time.labels(stage, each)
        registry.register(LiveGauges(self))

    def start(self, admission: AdmissionController, pool: ImagePool) -> None:
        """Begin to sample the machine, and name what the gauges read."""
        self.admission, self.pool = admission, pool
        self._gpus.watch_xids()
        self.gpus.start()
        self._memory.start()

    def describe(self, model: str, loaded: "LoadedEngine") -> None:
        """Say what runs here, once it does."""
        self.kv_cache_tokens, self.kv_cache_bytes = loaded.kv_cache_tokens, loaded.kv_cache_bytes
        self.build.labels(**VERSIONS, model=model, device=loaded.device).set(1)

    def stop(self) -> None:
        """Sample no more."""
        self.gpus.stop()
        self._memory.stop()

    @property
    def waiting_for_slot(self) -> dict[str, int]:
        """Requests that wait for a slot of the engine, by class."""
        return {each: self.admission.waiting(each) if self.admission else 0 for each in CLASSES}

    @property
    def running(self) -> int:
        """Requests that the engines run."""
        return sum(stats.num_running_reqs for stats in self._engines.values())

    @property
    def waiting(self) -> int:
        """Requests that have a slot and wait in the engines."""
        return sum(stats.num_waiting_reqs + stats.num_skipped_waiting_reqs for stats in self._engines.values())

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV cache in use, of the fullest engine."""
        return max((stats.kv_cache_usage for stats in self._engines.values()), default=0.0)

    @property
    def tokens_per_second(self) -> dict[str, float]:
        """Over 10 s, by kind."""
        return {"prompt": self.prompt_rate.per_second(), "generation": self.generation_rate.per_second()}

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of main memory held by `service` and `engine`; empty while it cannot be read."""
        return self._memory.latest

    def observe(self, request: GenerationRequest, result: Result) -> None:
        """Take the figures of one answer; its request's id stands beside its latencies."""
        timings, usage, priority = result.timings, result.usage, request.priority
        exemplar = {"request_id": request.id} if len(request.id) <= LONGEST_EXEMPLAR else {}
        if (trace_id := current_trace_id()) is not None:
            exemplar["trace_id"] = trace_id
        self.queue_time.labels("engine", priority).observe(sum(phase.queued_seconds for phase in result.phases))
        self.recent_queue_time.add(timings.queue_ms / 1e3)
        self.prefill.labels(priority).observe(timings.prefill_ms / 1e3)
        self.decode.labels(priority).observe(timings.decode_ms / 1e3)
        self.time_to_first_token.labels(priority).observe(timings.ttft_ms / 1e3, exemplar)
        self.request_seconds.labels(priority).observe(timings.total_ms / 1e3, exemplar)
        if timings.tokens_per_second:
            self.time_per_output_token.labels(priority).observe(1 / timings.tokens_per_second)
        for kind in TOKEN_KINDS[:-1]:
            self.tokens.labels(kind).inc(getattr(usage, f"{kind}_tokens"))
        self.tokens.labels("answer").inc(usage.completion_tokens - usage.reasoning_tokens)
        for tokens in result.image_tokens:
            self.image_tokens.observe(tokens)

    def record_engine(self, engine: int, scheduler: Any, iteration: Any) -> None:
        """Take one step of one of the data-parallel engines (vLLM's SchedulerStats, IterationStats; or None)."""
        if scheduler is not None:
            self._engines[engine] = scheduler
            self.prefix_cache_queries.inc(scheduler.prefix_cache_stats.queries)
            self.prefix_cache_hits.inc(scheduler.prefix_cache_stats.hits)
            if scheduler.iteration_details is not None:
                self.encoder_runs.inc(scheduler.iteration_details.num_encoder_inputs)
        if iteration is not None:
            self.prompt_rate.add(iteration.num_prompt_tokens)
            self.generation_rate.add(iteration.num_generation_tokens)


def stat_logger(telemetry: Telemetry) -> Callable[[Any, int], Any]:
    """A vLLM stat-logger factory that hands every engine step to `telemetry`."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class TelemetryLogger(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            telemetry.record_engine(engine_idx, scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    return TelemetryLogger
