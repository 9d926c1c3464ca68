"""What the service measures: Prometheus series and the figures that `/health` shows.

Both read the same objects, so that a figure on `/health` always equals its series.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from app.engine.admission import CLASSES, AdmissionController
from app.engine.gpu import Gpus
from app.engine.request import PriorityClass, Result
from app.images.pool import ImagePool

# Seconds: from a cached first token on a GPU to a long queue on a busy machine.
LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
LAG_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1)
WINDOW_SECONDS = 10.0


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
        gpus: Devices whose memory is reported.
        registry: Where the series are registered; vLLM registers its own in the default one.
    """

    def __init__(self, gpus: Gpus, registry: CollectorRegistry = REGISTRY) -> None:
        self.gpus = gpus
        self.admission: AdmissionController | None = None
        self.pool: ImagePool | None = None
        self._engines: dict[int, Any] = {}
        self.prompt_rate = Window()
        self.generation_rate = Window()
        self.recent_queue_time = Window()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"askimage_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"askimage_{name}_seconds", text, labels, buckets=LATENCY_BUCKETS, registry=registry)

        self.requests = counter(
            "requests",
            "Questions by class and by how they ended: a finish reason, an error code, or cancelled by the client.",
            "class",
            "outcome",
        )
        self.rejections = counter("rejections", "Requests that were turned away, by error code.", "reason")
        self.cancellations = counter("cancellations", "Clients that left, by how far their request was.", "phase")
        self.drains = counter("drains", "Shutdowns that let running requests finish.")
        self.restarts = counter("engine_restarts", "Starts of a new engine after the old one died.")
        self.tokens = counter("tokens", "Tokens by kind.", "kind")
        self.preprocess = histogram("preprocess", "Decoding and patching the images of a request.")
        self.queue_time = histogram(
            "queue_time",
            "Waiting for a slot (admission), then in the engine for the first step (engine).",
            "stage",
            "class",
        )
        self.prefill = histogram("prefill", "From the first prefill step to the first token.")
        self.time_to_first_token = histogram("time_to_first_token", "From the request's arrival to its first token.")
        self.decode = histogram("decode", "From the first token to the last.")
        self.request_seconds = histogram("request", "From the request's arrival to the end of its answer.")
        self.loop_lag = Histogram(
            "askimage_event_loop_lag_seconds",
            "How much later than asked a sleeping task woke up.",
            buckets=LAG_BUCKETS,
            registry=registry,
        )
        self.state = Gauge("askimage_engine_state", "1 for the engine's current state.", ["state"], registry=registry)
        registry.register(_Live(self))

    def watch(self, admission: AdmissionController, pool: ImagePool) -> None:
        """Name what the gauges read."""
        self.admission, self.pool = admission, pool

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

    def observe(self, priority: PriorityClass, result: Result) -> None:
        """Take the figures of one answer."""
        timings = result.timings
        self.queue_time.labels("engine", priority).observe(result.engine_queue_seconds)
        self.recent_queue_time.add(timings.queue_ms / 1e3)
        self.prefill.observe(timings.prefill_ms / 1e3)
        self.decode.observe(timings.decode_ms / 1e3)
        self.time_to_first_token.observe(timings.ttft_ms / 1e3)
        self.request_seconds.observe(timings.total_ms / 1e3)
        for kind in ("prompt", "image", "cached", "reasoning", "completion"):
            self.tokens.labels(kind).inc(getattr(result.usage, f"{kind}_tokens"))

    def record_engine(self, engine: int, scheduler: Any, iteration: Any) -> None:
        """Take one step of one of the data-parallel engines (vLLM's SchedulerStats, IterationStats; or None)."""
        if scheduler is not None:
            self._engines[engine] = scheduler
        if iteration is not None:
            self.prompt_rate.add(iteration.num_prompt_tokens)
            self.generation_rate.add(iteration.num_generation_tokens)


class _Live(Collector):
    """Gauges that are read when somebody asks."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        now = self._telemetry
        yield GaugeMetricFamily("askimage_running", "Requests the engine is running.", now.running)
        yield GaugeMetricFamily("askimage_engine_waiting", "Requests waiting inside the engine.", now.waiting)
        waiting = GaugeMetricFamily("askimage_waiting", "Requests waiting for a slot of the engine.", labels=["class"])
        for each, count in now.waiting_for_slot.items():
            waiting.add_metric([each], count)
        yield waiting
        if now.admission is not None and now.pool is not None:
            slots = GaugeMetricFamily("askimage_slots_used", "Slots of the engine in use.", labels=["class"])
            for each in CLASSES:
                slots.add_metric([each], now.admission.running(each))
            yield slots
            yield GaugeMetricFamily("askimage_slots", "Slots of the engine in all.", now.admission.capacity)
            yield GaugeMetricFamily(
                "askimage_preprocess_waiting", "Images waiting for a decoding thread.", now.pool.waiting
            )
        yield GaugeMetricFamily(
            "askimage_kv_cache_usage_ratio", "Share of the KV cache in use, 0-1.", now.kv_cache_usage
        )
        yield GaugeMetricFamily(
            "askimage_queue_time_recent_seconds", "Mean queue time over 10 s.", now.recent_queue_time.mean()
        )
        rate = GaugeMetricFamily("askimage_tokens_per_second", "Tokens per second over 10 s.", labels=["kind"])
        rate.add_metric(["prompt"], now.prompt_rate.per_second())
        rate.add_metric(["generation"], now.generation_rate.per_second())
        yield rate
        readings = now.gpus.memory()
        if readings:  # no series rather than zeros on a machine without GPUs
            for name, text in (("used", "GPU memory in use."), ("total", "GPU memory of the device.")):
                family = GaugeMetricFamily(f"askimage_gpu_memory_{name}_bytes", text, labels=["gpu"])
                for reading in readings:
                    family.add_metric([str(reading.index)], getattr(reading, f"{name}_bytes"))
                yield family


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
