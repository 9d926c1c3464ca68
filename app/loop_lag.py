"""How long the event loop keeps its tasks waiting: work that belongs into a thread shows up here first."""

import asyncio
import time

from prometheus_client import Histogram


async def measure_loop_lag(histogram: Histogram, every: float = 0.05) -> None:
    """Observe, until cancelled, how much later than asked a sleeping task wakes up.

    Args:
        histogram: Takes the lag in seconds, never negative.
        every: Seconds between two observations.
    """
    while True:
        asleep = time.monotonic()
        await asyncio.sleep(every)
        histogram.observe(max(0.0, time.monotonic() - asleep - every))
