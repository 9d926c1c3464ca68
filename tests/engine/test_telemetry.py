"""Figures that several engines and ten seconds go into."""

from prometheus_client import CollectorRegistry
from vllm.v1.metrics.stats import SchedulerStats

from app.engine.gpu import Gpus
from app.engine.telemetry import Telemetry, Window


def test_data_parallel_engines_are_added_up() -> None:
    registry = CollectorRegistry()
    telemetry = Telemetry(Gpus(), registry)
    telemetry.record_engine(0, SchedulerStats(num_running_reqs=3, num_waiting_reqs=1, kv_cache_usage=0.25), None)
    telemetry.record_engine(1, SchedulerStats(num_running_reqs=2, num_skipped_waiting_reqs=4, kv_cache_usage=0.5), None)
    telemetry.record_engine(0, None, None)
    assert (telemetry.running, telemetry.waiting, telemetry.kv_cache_usage) == (5, 5, 0.5)
    assert registry.get_sample_value("askimage_running") == 5
    assert registry.get_sample_value("askimage_kv_cache_usage_ratio") == 0.5


def test_a_window_forgets_after_ten_seconds() -> None:
    now = 0.0
    window = Window(lambda: now)
    window.add(20)
    now = 4.0
    window.add(40)
    assert (window.per_second(), window.mean()) == (6.0, 30.0)
    now = 10.0
    assert (window.per_second(), window.mean()) == (4.0, 40.0)
    now = 14.0
    assert (window.per_second(), window.mean()) == (0.0, 0.0)
