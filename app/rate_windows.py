"""Windows of time in which the rate limiter counts, and where the counts are kept: limits' own, and what it lacks.

Each window also says when a cost fits, and this process's memory forgets at its leisure.
"""

import asyncio
import time
from dataclasses import dataclass
from math import floor

from limits import RateLimitItem
from limits.aio.storage import MemoryStorage, RedisStorage, SlidingWindowCounterSupport
from limits.aio.strategies import MovingWindowRateLimiter, SlidingWindowCounterRateLimiter
from limits.errors import ConfigurationError
from redis.asyncio import BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from app.settings import SettingsError

SOCKET_SECONDS = 0.25
CALL_SECONDS = 0.5
CONNECTIONS = 16
INSTANT = 1e-3
SWEEP_SECONDS = 10.0
SWEEP_KEYS = 500


@dataclass(frozen=True, slots=True)
class Room:
    """What the storage says of one limit: units left, seconds until some come back, seconds until the cost fits.

    `wait` is 0 exactly where the cost fits now: a wait that rounds to nothing is still a refusal.
    """

    remaining: int
    reset: float
    wait: float


class MovingWindow(MovingWindowRateLimiter):
    """Exact: one entry for each unit."""

    async def room(self, item: RateLimitItem, *identifiers: str, cost: int) -> Room:
        """`cost` has to be 1: the storage tells when the oldest entry leaves, not when the ones after it do."""
        reset, remaining = await self.get_window_stats(item, *identifiers)
        # Without entries, the window starts with the request that comes now.
        seconds = float(item.get_expiry()) if remaining == item.amount else max(0.0, reset - time.time())
        return Room(remaining, seconds, max(seconds, INSTANT) if remaining < cost else 0.0)


class SlidingCounter(SlidingWindowCounterRateLimiter):
    """Two counts for each limit; what was spent in the window before counts as spread evenly over it."""

    async def room(self, item: RateLimitItem, *identifiers: str, cost: int) -> Room:
        """What is left of the limit, and when `cost` fits."""
        storage, window = self.storage, item.get_expiry()
        assert isinstance(storage, SlidingWindowCounterSupport)
        previous, fades, current, expires = await storage.get_sliding_window(item.key_for(*identifiers), window)
        remaining = max(0, item.amount - floor(previous * fades / window) - current)
        # The storage keeps a window's count for one window more, in which it fades away.
        ends = max(0.0, expires - window)
        reset = ends if current else fades
        if remaining >= cost:
            return Room(remaining, reset, 0.0)
        if current + cost <= item.amount:
            wait = fades - _fits(item, previous, current + cost)
        else:
            wait = ends + window - _fits(item, current, cost)
        return Room(remaining, reset, max(wait, INSTANT))


def _fits(item: RateLimitItem, fading: int, cost: int) -> float:
    """Seconds before its end from which a fading window of that count leaves room for `cost`."""
    window = item.get_expiry()
    return min(window, (item.amount - cost + 1) * window / fading) if fading else window


class Memory(MemoryStorage):
    """This process's memory.

    The library looks for outdated entries at every hit, with a thread for each key: with 10,000 clients that takes a
    whole core. It starts no search while its `timer` task runs, so a task of ours takes that place.
    """

    async def acquire_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        self._keep_sweeping()
        return bool(await super().acquire_entry(key, limit, expiry, amount))

    async def incr(self, key: str, expiry: float, amount: int = 1) -> int:
        self._keep_sweeping()
        return int(await super().incr(key, expiry, amount))

    def _keep_sweeping(self) -> None:
        if self.timer is None or self.timer.done():
            self.timer = asyncio.create_task(self._sweep())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            for count, key in enumerate([*self.events, *self.expirations]):
                if count % SWEEP_KEYS == 0:
                    await asyncio.sleep(0)
                self._forget(key, time.time())

    def _forget(self, key: str, now: float) -> None:
        """Drop what is outdated; between two awaits, so that no lock is needed."""
        if (lock := self.locks.get(key)) is not None and lock.locked():
            return
        if (entries := self.events.get(key)) is not None:  # the newest first
            while entries and entries[-1].expiry <= now:
                entries.pop()
            if not entries:
                del self.events[key]
        if self.expirations.get(key, now + 1) <= now:
            self.storage.pop(key, None)
            del self.expirations[key]
        if key not in self.events and key not in self.expirations:
            self.locks.pop(key, None)


def redis_storage(url: str) -> tuple[RedisStorage, BlockingConnectionPool]:
    """Redis with short timeouts and no retries: a request waits for it.

    Raises:
        SettingsError: The address is none. The message does not repeat it, since it may hold a password.
    """
    try:
        pool = BlockingConnectionPool.from_url(
            url.replace("redis+unix://", "unix://", 1),
            max_connections=CONNECTIONS,
            timeout=CALL_SECONDS,
            socket_timeout=SOCKET_SECONDS,
            socket_connect_timeout=SOCKET_SECONDS,
            retry=Retry(NoBackoff(), 0),
        )
        pool.connection_class(**pool.connection_kwargs)  # finds unknown parameters in the address, which from_url takes
        options = {"implementation": "redispy", "key_prefix": "askimage", "connection_pool": pool}
        return RedisStorage(url, **options), pool  # type: ignore[arg-type]
    except (ConfigurationError, TypeError, ValueError):
        raise SettingsError(
            "ASKIMAGE_LIMITS__STORAGE_URL: takes `redis://host:port/0`, `rediss://host:port/0` or "
            "`redis+unix:///path/to/socket?db=0`"
        ) from None
