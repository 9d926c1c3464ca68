"""Gauges that are read when somebody asks, from the objects that `/health` shows too."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from app.engine.admission import CLASSES

if TYPE_CHECKING:
    from app.engine.telemetry import Telemetry

_GPU_GAUGES = {
    "memory_used_bytes": "GPU memory in use, by all processes.",
    "memory_total_bytes": "GPU memory of the device.",
    "utilization_ratio": "Share of the last sampling period in which the GPU ran anything, 0-1.",
    "temperature_celsius": "Temperature of the GPU.",
    "power_watts": "Power that the GPU draws.",
}
_GPU_COUNTERS = {
    "ecc_errors": "Uncorrected memory errors since the driver was loaded.",
    "xid_errors": "Errors that the driver reported (Xid) since this process started.",
}


class LiveGauges(Collector):
    """Collects the gauges of one service."""

    def __init__(self, telemetry: "Telemetry") -> None:
        self._telemetry = telemetry

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        now = self._telemetry

        def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"askimage_{name}", text, value)

        def by(name: str, text: str, label: str, values: Mapping[Any, float]) -> GaugeMetricFamily:
            family = GaugeMetricFamily(f"askimage_{name}", text, labels=[label])
            for each, value in values.items():
                family.add_metric([each], value)
            return family

        yield gauge("running", "Requests the engine is running.", now.running)
        yield gauge("engine_waiting", "Requests that have a slot and wait inside the engine.", now.waiting)
        yield by("waiting", "Requests waiting for a slot of the engine.", "class", now.waiting_for_slot)
        if now.admission is not None and now.pool is not None:
            used = {each: float(now.admission.running(each)) for each in CLASSES}
            yield by("slots_used", "Slots of the engine in use.", "class", used)
            yield gauge("slots", "Slots of the engine in all.", now.admission.capacity)
            yield gauge("preprocess_waiting", "Images waiting for a decoding thread.", now.pool.waiting)
        yield gauge("kv_cache_usage_ratio", "Share of the KV cache in use, 0-1.", now.kv_cache_usage)
        if now.kv_cache_tokens is not None:
            yield gauge("kv_cache_tokens", "Tokens that the KV cache holds.", now.kv_cache_tokens)
        if now.kv_cache_bytes is not None:
            yield gauge("kv_cache_bytes", "Size of the KV cache, where it is set.", now.kv_cache_bytes)
        yield gauge("queue_time_recent_seconds", "Mean queue time over 10 s.", now.recent_queue_time.mean())
        yield by("tokens_per_second", "Tokens per second over 10 s.", "kind", now.tokens_per_second)
        yield by("memory_bytes", "Main memory held, of this process and of the engine's.", "process", now.memory)
        yield from self._gpus()

    def _gpus(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """No series rather than zeros on a machine without GPUs, and for what a GPU does not tell."""
        kinds: tuple[tuple[Callable[..., Any], dict[str, str]], ...] = (
            (GaugeMetricFamily, _GPU_GAUGES),
            (CounterMetricFamily, _GPU_COUNTERS),
        )
        readings = self._telemetry.gpus.latest
        info = GaugeMetricFamily("askimage_gpu_info", "1 for each GPU, with its name.", labels=["gpu", "name"])
        for reading in readings:
            info.add_metric([str(reading.index), reading.name], 1)
        if info.samples:
            yield info
        for kind, fields in kinds:
            for field, text in fields.items():
                told = [(reading.index, getattr(reading, field)) for reading in readings]
                family = kind(f"askimage_gpu_{field}", text, labels=["gpu"])
                for index, value in told:
                    if value is not None:
                        family.add_metric([str(index)], value)
                if family.samples:
                    yield family
