"""What `askimage top` shows, worked out from two readings of `/metrics`."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from app.engine.admission import CLASSES
from app.engine.gpu import GpuReading

ANSWERED = frozenset({"stop", "length", "thinking_length"})
PHASES = {
    "admission": ("askimage_queue_time_seconds", {"stage": "admission"}),
    "preprocess": ("askimage_preprocess_seconds", {}),
    "engine_queue": ("askimage_queue_time_seconds", {"stage": "engine"}),
    "prefill": ("askimage_prefill_seconds", {}),
    "decode": ("askimage_decode_seconds", {}),
    "first_token": ("askimage_time_to_first_token_seconds", {}),
    "request": ("askimage_request_seconds", {}),
}
"""Name of a phase, and the histogram that holds it, in the order in which a request goes through them."""


class Reading:
    """One `/metrics` page.

    Args:
        page: Prometheus' text format; only the service's own series are read.
        at: When it was read, in Unix seconds.

    Raises:
        ValueError: It is no such page, or no page of this service.
    """

    def __init__(self, page: str, at: float) -> None:
        self.at = at
        ours = [line for line in page.split("\n") if line.startswith(("askimage_", "process_start_time_seconds "))]
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families("\n".join([*ours, ""])):
            for sample in family.samples:
                self._samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        if "askimage_engine_state" not in self._samples:
            raise ValueError("no metrics of this service")

    @property
    def started(self) -> float:
        """When the process started, in Unix seconds; it tells two processes behind one address apart."""
        return self.value("process_start_time_seconds") or 0.0

    def samples(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        """Those with these labels, among others."""
        return (each for each in self._samples.get(name, ()) if labels.items() <= each[0].items())

    def value(self, name: str, **labels: str) -> float | None:
        """Sum of the samples; None when there is none."""
        values = [value for _, value in self.samples(name, **labels)]
        return sum(values) if values else None

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Values by one label, summed over the others."""
        values: dict[str, float] = {}
        for each, value in self.samples(name, **labels):
            values[each[label]] = values.get(each[label], 0.0) + value
        return values


@dataclass(frozen=True, slots=True)
class Quantiles:
    """In seconds, interpolated in the histogram's buckets; None when nothing was observed."""

    p50: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class ClassRow:
    """One class of service.

    Attributes:
        slots_used: Slots of the engine that it has now.
        waiting: Its requests that wait for a slot now.
        questions_per_second: That ended, in any way.
        failed_per_second: That ended with an error; those that a client left are not among them.
        seconds: By phase, see `PHASES`.
    """

    slots_used: float | None
    waiting: float | None
    questions_per_second: float
    failed_per_second: float
    seconds: dict[str, Quantiles]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State now, and rates and latencies over the last `window_seconds`; None where the service does not tell.

    Attributes:
        classes: By class of service.
        slots: Of the engine in all.
        tokens_per_second: By kind, over 10 s.
        kv_cache_usage_ratio: In use, 0-1.
        prefix_cache_hit_ratio: Share of prompt tokens that were found in the cache.
        encoder_cache_hit_ratio: Share of images that needed no run of the vision encoder.
        event_loop_lag_seconds: The 99th percentile.
        preprocess_waiting: Images that wait for a decoding thread.
        rejections_per_second: By error code, without zeros.
        memory_bytes: Main memory by process.
        gpus: As NVML tells.
    """

    state: str
    model: str | None
    device: str | None
    versions: dict[str, str]
    uptime_seconds: float
    window_seconds: float
    classes: dict[str, ClassRow]
    slots: float | None
    tokens_per_second: dict[str, float]
    kv_cache_usage_ratio: float | None
    kv_cache_tokens: float | None
    prefix_cache_hit_ratio: float | None
    encoder_cache_hit_ratio: float | None
    event_loop_lag_seconds: float | None
    preprocess_waiting: float | None
    rejections_per_second: dict[str, float]
    memory_bytes: dict[str, float]
    gpus: list[GpuReading] = field(default_factory=list)


class Window:
    """Readings of the last seconds.

    Args:
        seconds: How far back rates and latencies look.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._readings: deque[Reading] = deque()

    def add(self, reading: Reading) -> Snapshot:
        """What the service did between the oldest reading and this one; since its start when this is the first."""
        if self._readings and self._readings[-1].started != reading.started:
            self._readings.clear()  # another process counts from zero again
        self._readings.append(reading)
        while len(self._readings) > 2 and reading.at - self._readings[0].at > self._seconds:
            self._readings.popleft()
        return snapshot(reading, self._readings[0] if len(self._readings) > 1 else None)


def snapshot(now: Reading, before: Reading | None = None) -> Snapshot:
    """Compare two readings of one process; without `before`, count from the process's start."""
    changes = _Changes(now, before)
    build = next((labels for labels, value in now.samples("askimage_build_info") if value), {})
    states = now.by("askimage_engine_state", "state")
    queries, hits = changes.count("askimage_prefix_cache_queries"), changes.count("askimage_prefix_cache_hits")
    images, runs = changes.count("askimage_encoder_queries"), changes.count("askimage_encoder_runs")
    rejections = {reason: changes.rate("askimage_rejections", reason=reason) for reason in _reasons(now)}
    return Snapshot(
        state=next((state for state, value in states.items() if value), "unknown"),
        model=build.get("model"),
        device=build.get("device"),
        versions={name: text for name, text in build.items() if name not in {"model", "device"}},
        uptime_seconds=max(0.0, now.at - now.started),
        window_seconds=changes.seconds,
        classes={each: _row(now, changes, each) for each in CLASSES},
        slots=now.value("askimage_slots"),
        tokens_per_second=now.by("askimage_tokens_per_second", "kind"),
        kv_cache_usage_ratio=now.value("askimage_kv_cache_usage_ratio"),
        kv_cache_tokens=now.value("askimage_kv_cache_tokens"),
        prefix_cache_hit_ratio=hits / queries if queries else None,
        encoder_cache_hit_ratio=max(0.0, 1 - runs / images) if images else None,
        event_loop_lag_seconds=changes.quantile(0.99, "askimage_event_loop_lag_seconds"),
        preprocess_waiting=now.value("askimage_preprocess_waiting"),
        rejections_per_second={reason: rate for reason, rate in rejections.items() if rate},
        memory_bytes=now.by("askimage_memory_bytes", "process"),
        gpus=_gpus(now),
    )


class _Changes:
    """What counters and histograms gained."""

    def __init__(self, now: Reading, before: Reading | None) -> None:
        self._now, self._before = now, before
        self.seconds = max(1e-3, now.at - (before.at if before else now.started))

    def count(self, family: str, **labels: str) -> float:
        return self._gain(f"{family}_total", **labels)

    def rate(self, family: str, **labels: str) -> float:
        return self.count(family, **labels) / self.seconds

    def quantile(self, share: float, family: str, **labels: str) -> float | None:
        """As Prometheus' `histogram_quantile`: evenly spread in a bucket, and the highest bound for what is above."""
        bounds = sorted((math.inf if each == "+Inf" else float(each), each) for each in self._bounds(family, **labels))
        counts = [self._gain(f"{family}_bucket", le=text, **labels) for _, text in bounds]
        if not counts or counts[-1] <= 0:
            return None
        rank = share * counts[-1]
        index = next(index for index, count in enumerate(counts) if count >= rank)
        low, below = (bounds[index - 1][0], counts[index - 1]) if index else (0.0, 0.0)
        high = bounds[index][0]
        return low if high == math.inf else low + (high - low) * (rank - below) / (counts[index] - below)

    def _bounds(self, family: str, **labels: str) -> set[str]:
        return set(self._now.by(f"{family}_bucket", "le", **labels))

    def _gain(self, name: str, **labels: str) -> float:
        before = self._before.value(name, **labels) if self._before else None
        return (self._now.value(name, **labels) or 0.0) - (before or 0.0)


def _row(now: Reading, changes: _Changes, each: str) -> ClassRow:
    outcomes = now.by("askimage_requests_total", "outcome", **{"class": each})
    ended = {outcome: changes.rate("askimage_requests", outcome=outcome, **{"class": each}) for outcome in outcomes}
    seconds = {}
    for phase, (family, stage) in PHASES.items():
        labels = stage | {"class": each}
        seconds[phase] = Quantiles(changes.quantile(0.5, family, **labels), changes.quantile(0.99, family, **labels))
    return ClassRow(
        slots_used=now.value("askimage_slots_used", **{"class": each}),
        waiting=now.value("askimage_waiting", **{"class": each}),
        questions_per_second=sum(ended.values()),
        failed_per_second=sum(rate for name, rate in ended.items() if name not in ANSWERED | {"cancelled"}),
        seconds=seconds,
    )


def _reasons(now: Reading) -> list[str]:
    return sorted(now.by("askimage_rejections_total", "reason"))


def _gpus(now: Reading) -> list[GpuReading]:
    def told(name: str, gpu: str) -> float | None:
        return now.value(f"askimage_gpu_{name}", gpu=gpu)

    def counted(name: str, gpu: str) -> int | None:
        value = told(f"{name}_total", gpu)
        return None if value is None else int(value)

    names = {labels["gpu"]: labels["name"] for labels, _ in now.samples("askimage_gpu_info")}
    return [
        GpuReading(
            index=int(gpu),
            name=names.get(gpu, ""),
            memory_used_bytes=int(used),
            memory_total_bytes=int(told("memory_total_bytes", gpu) or 0),
            utilization_ratio=told("utilization_ratio", gpu),
            temperature_celsius=told("temperature_celsius", gpu),
            power_watts=told("power_watts", gpu),
            ecc_errors=counted("ecc_errors", gpu),
            xid_errors=counted("xid_errors", gpu),
        )
        for gpu, used in now.by("askimage_gpu_memory_used_bytes", "gpu").items()
    ]
