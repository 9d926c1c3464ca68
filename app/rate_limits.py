"""How much each client may ask for: requests and image tokens in windows of time, counted here or in Redis.

Limits are declared as slowapi's, and looked at before a request's body is read; slowapi itself looks after that.

Requests are counted by moving windows, which are exact. A moving window keeps one entry for each unit, which for image
tokens would be hundreds of thousands for each client; they are counted by sliding window counters, two numbers for each
limit, which take what was spent in the window before as spread evenly over it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import TypeVar

from limits import RateLimitItem
from limits.aio.storage import RedisStorage
from prometheus_client import REGISTRY, CollectorRegistry, Counter
from redis.asyncio import BlockingConnectionPool
from slowapi.errors import RateLimitExceeded
from slowapi.wrappers import Limit, LimitGroup

from app.errors import Overloaded, RateLimited
from app.identity import Client
from app.rate_windows import CALL_SECONDS, Memory, MovingWindow, Room, SlidingCounter, redis_storage
from app.settings import LimitSettings, SettingsError

RETRY_SECONDS = 1.0
WARNING_SECONDS = 10.0

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a client stands with one limit, as the `RateLimit` headers tell it.

    Attributes:
        policy: `requests` or `image-tokens`; where there are several, `requests-per-hour` or `requests-per-10-minutes`.
        quota: Units of one window.
        window: Its length in seconds.
        remaining: Units that are left.
        reset: Seconds until some are given back; of a limit that refused, until what was asked for fits.
    """

    policy: str
    quota: int
    window: int
    remaining: int
    reset: int


class LimitReached(RateLimited):
    """The refusal of one limit; `standings` are those of all that were looked at."""

    standings: Sequence[Standing] = ()


@dataclass(frozen=True, slots=True)
class _Policy:
    name: str
    limit: Limit

    @property
    def item(self) -> RateLimitItem:
        return self.limit.limit

    @property
    def words(self) -> str:
        return f"{self.item.amount} {self.limit.scope.replace('-', ' ')} per {_period(self.item)}"

    def standing(self, room: Room) -> Standing:
        reset = ceil(room.wait or room.reset)
        return Standing(self.name, self.item.amount, self.item.get_expiry(), room.remaining, reset)


class _StorageSilent(Exception):
    """The storage fails, or is left alone because it just did."""


class RateLimiter:
    """Counts what each client spends against its limits.

    Args:
        settings: Limits of clients whose tier names none, where they are counted, and what holds without an answer.
        registry: Where the count of unanswered checks is registered.

    Raises:
        SettingsError: A limit or the storage's address cannot be used.
    """

    def __init__(self, settings: LimitSettings, registry: CollectorRegistry = REGISTRY) -> None:
        for field, text in (("REQUESTS", settings.requests), ("IMAGE_TOKENS", settings.image_tokens)):
            try:
                _declared("", text)
            except ValueError:
                raise SettingsError(
                    f"ASKIMAGE_LIMITS__{field}: limits look like `120/minute;2000/hour` (got {text!r})"
                ) from None
        self._settings = settings
        self._storage: Memory | RedisStorage
        self._pool: BlockingConnectionPool | None
        self._storage, self._pool = redis_storage(settings.storage_url) if settings.storage_url else (Memory(), None)
        self._strategies: dict[str, MovingWindow | SlidingCounter] = {
            "requests": MovingWindow(self._storage),
            "image-tokens": SlidingCounter(self._storage),
        }
        self._unanswered = Counter(
            "askimage_rate_limit_storage_errors",
            "Times that a client's limits were not looked at, because their storage did not answer.",
            registry=registry,
        )
        self._silent = False
        self._next_try = 0.0
        self._next_warning = 0.0

    async def admit(self, client: Client) -> list[Standing]:
        """Count one request, before its body is read; one that is refused is not counted.

        Returns:
            Where the client stands with each of its limits; empty without limits, or without an answer.

        Raises:
            LimitReached: A limit on requests is reached, or one on image tokens used up.
            Overloaded: The storage does not answer, and `fail_open` is off.
        """
        requests = _declared("requests", client.tier.requests or self._settings.requests)
        return await self._spend(client, 1, requests, looked_at=self._on_image_tokens(client))

    async def charge_image_tokens(self, client: Client, tokens: int) -> None:
        """Count the image tokens of a request; those of one that is refused are not counted.

        Raises:
            LimitReached: They do not fit a limit now, or (without `retry_after`) ever.
            Overloaded: The storage does not answer, and `fail_open` is off.
        """
        policies = self._on_image_tokens(client)
        for policy in policies:
            if tokens > policy.item.amount:
                raise LimitReached(
                    f"{tokens} image tokens can never fit the limit of {policy.words}; send a smaller image or ask for "
                    "a larger limit",
                    limit=policy.item.amount,
                ) from RateLimitExceeded(policy.limit)
        if tokens > 0:
            await self._spend(client, tokens, policies)

    async def close(self) -> None:
        """Let go of the storage."""
        if self._pool is not None:
            await self._pool.aclose()
        elif isinstance(self._storage, Memory) and self._storage.timer is not None:
            self._storage.timer.cancel()

    def _on_image_tokens(self, client: Client) -> tuple[_Policy, ...]:
        return _declared("image-tokens", client.tier.image_tokens or self._settings.image_tokens)

    async def _spend(
        self, client: Client, cost: int, spent: tuple[_Policy, ...], looked_at: tuple[_Policy, ...] = ()
    ) -> list[Standing]:
        policies = spent + looked_at
        if not policies:
            return []
        try:
            rooms = await self._ask(lambda: self._hit(client, cost, policies, len(spent)))
        except _StorageSilent:
            self._unanswered.inc()
            if self._settings.fail_open:
                return []
            raise Overloaded("the rate-limit storage does not answer", retry_after=5) from None
        standings = [policy.standing(room) for policy, room in zip(policies, rooms, strict=True)]
        policy, room = max(zip(policies, rooms, strict=True), key=lambda pair: pair[1].wait)
        if room.wait:
            needs = "" if cost == 1 else f": {room.remaining} are left, and this request takes {cost}"
            refusal = LimitReached(
                f"the limit of {policy.words} is reached{needs}",
                limit=policy.item.amount,
                retry_after=max(1, ceil(room.wait)),
            )
            refusal.standings = standings
            raise refusal from RateLimitExceeded(policy.limit)
        return standings

    async def _hit(self, client: Client, cost: int, policies: tuple[_Policy, ...], spent: int) -> list[Room]:
        """The room in each limit, after the cost was taken from the first `spent` ones if it fits all."""

        async def room(policy: _Policy) -> Room:
            strategy = self._strategies[policy.limit.scope]
            return await strategy.room(policy.item, policy.limit.scope, policy.limit.key_func(client), cost=cost)

        rooms = list(await asyncio.gather(*map(room, policies)))
        if any(each.wait for each in rooms):
            return rooms
        # The tightest first: where another request was faster, it is the one that refuses, with nothing spent yet.
        for index in sorted(range(spent), key=lambda index: rooms[index].remaining):
            policy = policies[index]
            strategy, scope = self._strategies[policy.limit.scope], policy.limit.scope
            if not await strategy.hit(policy.item, scope, policy.limit.key_func(client), cost=cost):
                now = await room(policy)
                rooms[index] = replace(now, remaining=min(now.remaining, cost - 1), wait=now.wait or 1.0)
                break
            rooms[index] = replace(rooms[index], remaining=rooms[index].remaining - cost)
        return rooms

    async def _ask(self, question: Callable[[], Awaitable[_T]]) -> _T:
        """The storage's answer.

        Raises:
            _StorageSilent: It fails, or did so a moment ago. A storage that hangs costs one request in a second its
                timeout, not all of them.
        """
        now = time.monotonic()
        if self._silent:
            if now < self._next_try:
                raise _StorageSilent
            self._next_try = now + RETRY_SECONDS
        try:
            async with asyncio.timeout(CALL_SECONDS):
                answer = await question()
        except Exception as error:
            self._failed(error)
            raise _StorageSilent from error
        if self._silent:
            self._silent = False
            logger.info("the rate-limit storage answers again")
        return answer

    def _failed(self, error: Exception) -> None:
        now = time.monotonic()
        self._silent, self._next_try = True, now + RETRY_SECONDS
        if now >= self._next_warning:
            self._next_warning = now + WARNING_SECONDS
            then = "go through unlimited" if self._settings.fail_open else "are refused"
            reason = f"{type(error).__name__}: {error}"
            logger.warning("the rate-limit storage does not answer, requests %s (%s)", then, reason)


@lru_cache(maxsize=1024)
def _declared(dimension: str, text: str | None) -> tuple[_Policy, ...]:
    """The limits that a text declares; of several for one period the smallest, which is the one that holds.

    Raises:
        ValueError: They cannot be read.
    """
    if not text:
        return ()
    group = LimitGroup(text, _client_id, dimension, False, None, None, None, 1, False)
    limits = sorted(group, key=lambda limit: (limit.limit.get_expiry(), -limit.limit.amount))
    smallest = {limit.limit.get_expiry(): limit for limit in limits}.values()
    if len(smallest) == 1:
        return tuple(_Policy(dimension, limit) for limit in smallest)
    return tuple(
        _Policy(f"{dimension}-per-{_period(limit.limit).removeprefix('1 ').replace(' ', '-')}", limit)
        for limit in smallest
    )


def _client_id(client: Client) -> str:
    return client.id


def _period(item: RateLimitItem) -> str:
    return f"{item.multiples} {item.GRANULARITY.name}{'s' if item.multiples > 1 else ''}"
