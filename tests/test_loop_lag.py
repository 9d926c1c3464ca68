"""How late the event loop is."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry, Histogram

from app.loop_lag import measure_loop_lag


class Watched(Histogram):
    """A histogram that a test can wait for."""

    seen: asyncio.Queue[float]

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        super().observe(amount, exemplar)
        self.seen.put_nowait(amount)


@contextlib.asynccontextmanager
async def measuring(registry: CollectorRegistry, every: float) -> AsyncIterator[asyncio.Queue[float]]:
    """What is observed, one by one."""
    lag = Watched("lag_seconds", "Lag.", buckets=(0.1, 0.5), registry=registry)
    lag.seen = asyncio.Queue()
    task = asyncio.create_task(measure_loop_lag(lag, every))
    try:
        async with asyncio.timeout(10):
            yield lag.seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_blocked_loop_is_in_the_histogram() -> None:
    registry = CollectorRegistry()
    async with measuring(registry, every=0.01) as seen:
        await seen.get()
        time.sleep(0.2)  # noqa: ASYNC251 - what the service must never do
        lag = await seen.get()
    assert 0.15 < lag < 5
    slow = registry.get_sample_value("lag_seconds_count") - registry.get_sample_value(
        "lag_seconds_bucket", {"le": "0.1"}
    )
    assert slow >= 1


async def test_the_time_asked_for_is_no_lag() -> None:
    async with measuring(CollectorRegistry(), every=0.1) as seen:
        assert min([await seen.get() for _ in range(5)]) < 0.05


async def test_waking_up_early_is_no_negative_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep
    monkeypatch.setattr("app.loop_lag.asyncio.sleep", lambda _: sleep(0))
    async with measuring(CollectorRegistry(), every=60) as seen:
        assert await seen.get() == 0
