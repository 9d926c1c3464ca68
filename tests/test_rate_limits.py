"""What clients may spend, counted in memory and in a real Redis that hangs, dies and comes back."""

import asyncio
import logging
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from limits.aio.storage import RedisStorage
from prometheus_client import CollectorRegistry
from redis import Redis as Connection
from redis.exceptions import RedisError
from slowapi.errors import RateLimitExceeded

from app import rate_limits, rate_windows
from app.errors import Overloaded, RateLimited
from app.identity import Client, Tier
from app.rate_limits import LimitReached, RateLimiter, Standing
from app.settings import LimitSettings, SettingsError
from support import wait_for


class Redis:
    """A Redis of the test's own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.socket = folder / "redis.sock"
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        program = shutil.which("redis-server", path="/usr/bin:/usr/local/bin")
        if program is None:
            pytest.fail("these tests need redis-server (Debian: apt-get install redis-server)")
        where = ["--bind", "127.0.0.1", "--port", str(self.port), "--unixsocket", str(self.socket)]
        memory_only = ["--save", "", "--appendonly", "no", "--dir", str(self._folder)]
        self._process = subprocess.Popen([program, *where, *memory_only], stdout=subprocess.DEVNULL)
        wait_for(self.answers, 10, "Redis answers")

    def answers(self) -> bool:
        try:
            with Connection(port=self.port, socket_timeout=1) as connection:
                return bool(connection.ping())
        except RedisError:
            return False

    def stored(self) -> list[bytes]:
        with Connection(port=self.port) as connection:
            return list(connection.keys("*"))

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    server = Redis(tmp_path)
    yield server
    server.kill()


@pytest.fixture(params=["memory", "redis"])
def storage(request: pytest.FixtureRequest) -> str | None:
    """Where limits are counted: each test that takes it runs in memory and in Redis."""
    return request.getfixturevalue("redis").url if request.param == "redis" else None


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not let requests through as unanswered."""
    for patience in ("CALL_SECONDS", "SOCKET_SECONDS"):
        monkeypatch.setattr(rate_windows, patience, 30)
    monkeypatch.setattr(rate_limits, "CALL_SECONDS", 30)


def limiter(
    storage_url: str | None = None, registry: CollectorRegistry | None = None, **settings: object
) -> RateLimiter:
    declared = LimitSettings.model_validate({"storage_url": storage_url, **settings})
    return RateLimiter(declared, registry or CollectorRegistry())


def client(name: str = "phone-app", requests: str | None = None, image_tokens: str | None = None) -> Client:
    return Client(name, f"key:{name}", Tier(requests=requests, image_tokens=image_tokens))


async def refusal(attempt: Awaitable[object]) -> LimitReached:
    with pytest.raises(LimitReached) as caught:
        await attempt
    return caught.value


async def until(condition: Callable[[], Awaitable[bool]], seconds: float, what: str) -> float:
    """How long it took until `condition` held."""
    start = time.monotonic()
    while not await condition():
        if time.monotonic() > start + seconds:
            pytest.fail(f"not within {seconds} s: {what}")
        await asyncio.sleep(0.01)
    return time.monotonic() - start


async def passes(attempt: Awaitable[object]) -> bool:
    try:
        await attempt
    except RateLimited:
        return False
    return True


class Clock:
    """`time.time` of the storage in memory."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.25

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    return clock


async def test_a_request_past_the_limit_is_refused_in_words(storage: str | None) -> None:
    limits = limiter(storage, requests="2/minute")
    assert [each.remaining for _ in range(2) for each in await limits.admit(client())] == [1, 0]
    error = await refusal(limits.admit(client()))
    assert error.detail == "the limit of 2 requests per 1 minute is reached"
    assert (error.status, error.code, error.limit) == (429, "rate_limited", 2)
    assert error.retry_after in (59, 60)
    assert error.standings == [Standing("requests", 2, 60, 0, error.retry_after)]
    assert isinstance(error.__cause__, RateLimitExceeded)
    assert error.__cause__.limit is not None
    assert error.__cause__.limit.limit.amount == 2
    await limits.close()


async def test_clients_do_not_share_what_they_may_spend(storage: str | None) -> None:
    limits = limiter(storage, requests="1/minute")
    assert await passes(limits.admit(client("a")))
    assert await passes(limits.admit(client("b")))
    assert not await passes(limits.admit(client("a")))
    await limits.close()


async def test_the_tiers_limits_replace_the_services() -> None:
    limits = limiter(requests="1/minute", image_tokens="10/minute")
    assert [each.quota for each in await limits.admit(client())] == [1, 10]
    assert [each.quota for each in await limits.admit(client("b", "5/hour", "70/day"))] == [5, 70]


async def test_without_limits_the_storage_is_not_asked() -> None:
    registry = CollectorRegistry()
    limits = limiter("redis://127.0.0.1:1/0", registry)
    assert await limits.admit(client()) == []
    await limits.charge_image_tokens(client(), 1000)
    assert registry.get_sample_value("askimage_rate_limit_storage_errors_total") == 0


async def test_several_limits_are_named_by_their_periods() -> None:
    standings = await limiter(requests="50/10 minutes;2/second, 100/hour;70/hour").admit(client())
    assert standings == [
        Standing("requests-per-second", 2, 1, 1, 1),
        Standing("requests-per-10-minutes", 50, 600, 49, 600),
        Standing("requests-per-hour", 70, 3600, 69, 3600),
    ]


async def test_a_refusal_spends_nothing(storage: str | None) -> None:
    limits = limiter(storage, requests="1/second;3/hour")
    await limits.admit(client())
    for _ in range(20):
        await refusal(limits.admit(client()))

    async def free() -> bool:
        return await passes(limits.admit(client()))

    await until(free, 3, "the second is over")
    await until(free, 3, "the next second is over")
    error = await refusal(limits.admit(client()))
    assert error.detail == "the limit of 3 requests per 1 hour is reached"
    await limits.close()


async def test_requests_that_lack_image_tokens_are_refused_and_not_counted(storage: str | None) -> None:
    limits = limiter(storage, requests="5/minute", image_tokens="100/minute")
    await limits.charge_image_tokens(client(), 100)
    error = await refusal(limits.admit(client()))
    assert error.detail == "the limit of 100 image tokens per 1 minute is reached"
    assert [(each.policy, each.remaining) for each in error.standings] == [("requests", 5), ("image-tokens", 0)]
    await limits.close()


async def test_a_limit_of_nothing_lets_nothing_through(storage: str | None) -> None:
    for each in (client("a", requests="0/minute"), client("b", requests="5/minute", image_tokens="0/minute")):
        error = await refusal(limiter(storage).admit(each))
        assert (error.limit, error.standings[-1].remaining) == (0, 0)
        assert error.retry_after is not None
        assert error.retry_after >= 1


async def test_image_tokens_that_do_not_fit_are_refused_and_not_counted(storage: str | None) -> None:
    limits = limiter(storage, image_tokens="100/minute;120/hour")
    await limits.charge_image_tokens(client(), 70)
    error = await refusal(limits.charge_image_tokens(client(), 60))
    assert error.detail.endswith("is reached: 50 are left, and this request takes 60")
    assert "120 image tokens per 1 hour" in error.detail
    await refusal(limits.charge_image_tokens(client(), 31))
    await limits.charge_image_tokens(client(), 30)
    await limits.charge_image_tokens(client(), 0)
    await limits.close()


async def test_image_tokens_larger_than_a_limit_can_never_fit(storage: str | None) -> None:
    limits = limiter(storage, image_tokens="100/minute;90/hour")
    error = await refusal(limits.charge_image_tokens(client(), 91))
    assert "can never fit the limit of 90 image tokens per 1 hour; send a smaller image" in error.detail
    assert (error.limit, error.retry_after) == (90, None)
    assert isinstance(error.__cause__, RateLimitExceeded)
    await limits.charge_image_tokens(client(), 90)
    await limits.close()


async def test_a_request_passes_when_the_refusal_said(clock: Clock) -> None:
    limits = limiter(requests="3/minute")
    for _ in range(3):
        await limits.admit(client())
        clock.now += 7.5
    error = await refusal(limits.admit(client()))
    assert error.retry_after == 38  # 60 s after the first one, 37.5 s from now
    clock.now += error.retry_after - 1
    assert not await passes(limits.admit(client()))
    clock.now += 1
    assert await passes(limits.admit(client()))
    assert not await passes(limits.admit(client()))


async def test_a_window_that_is_over_starts_anew_with_the_next_request(clock: Clock) -> None:
    limits = limiter(requests="3/minute")
    await limits.admit(client())
    clock.now += 61  # the storage in memory still holds the entry that is over
    assert await limits.admit(client()) == [Standing("requests", 3, 60, 2, 60)]


@pytest.mark.parametrize("before", [0, 1, 30, 100])
@pytest.mark.parametrize("cost", [1, 40, 100])
async def test_image_tokens_fit_when_the_refusal_said(clock: Clock, before: int, cost: int) -> None:
    clock.now = 1_800_000_000 + 3.25  # in a window that began 3.25 s ago
    limits = limiter(image_tokens="100/minute")
    await limits.charge_image_tokens(client(), before)
    clock.now += 60
    while await passes(limits.charge_image_tokens(client(), 1)):
        pass
    error = await refusal(limits.charge_image_tokens(client(), cost))
    assert error.retry_after is not None
    clock.now += error.retry_after - 1
    assert error.retry_after == 1 or not await passes(limits.charge_image_tokens(client(), cost))
    clock.now += 1
    assert await passes(limits.charge_image_tokens(client(), cost))


@pytest.mark.parametrize("spent", [(3, 1), (20, 15), (60, 60)])
async def test_image_tokens_in_redis_fit_when_the_refusal_said(
    redis: Redis, spent: tuple[int, int], patient: None
) -> None:
    limits = limiter(redis.url, image_tokens="60/2 second")
    for tokens in spent:
        await until(lambda n=tokens: passes(limits.charge_image_tokens(client(), n)), 6, f"{tokens} fit")  # type: ignore[misc]
    error = await refusal(limits.charge_image_tokens(client(), 60))
    wait = error.retry_after
    assert wait is not None
    took = await until(lambda: passes(limits.charge_image_tokens(client(), 60)), 8, "60 fit")
    assert wait - 1.1 <= took <= wait + 0.1
    await limits.close()


@pytest.mark.parametrize("limit", ["10/minute", "10/minute;1000/hour", "1000/minute;10/hour"])
async def test_a_hundred_at_once_do_not_pass_a_limit_of_ten(storage: str | None, limit: str, patient: None) -> None:
    limits = limiter(storage, requests=limit, image_tokens=limit)
    assert sum(await asyncio.gather(*(passes(limits.admit(client())) for _ in range(100)))) == 10
    charged = await asyncio.gather(*(passes(limits.charge_image_tokens(client("b"), 2)) for _ in range(100)))
    assert sum(charged) == 5
    await limits.close()


async def test_who_loses_a_race_is_told_to_wait(storage: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = limiter(storage, requests="1/minute;5/hour")

    async def other_was_faster(*_: object, **__: object) -> bool:
        return False

    monkeypatch.setattr(limits._strategies["requests"], "hit", other_was_faster)
    error = await refusal(limits.admit(client()))
    assert error.retry_after is not None
    assert error.retry_after >= 1
    assert [each.remaining for each in error.standings] == [0, 5]
    await limits.close()


async def test_replicas_share_limits_in_redis(redis: Redis) -> None:
    one = limiter(redis.url, requests="3/minute", image_tokens="100/minute")
    other = limiter(f"redis+unix://{redis.socket}?db=0", requests="3/minute", image_tokens="100/minute")
    for limits in (one, other, one):
        assert await passes(limits.admit(client()))
    assert not await passes(other.admit(client()))
    await one.charge_image_tokens(client("b"), 60)
    assert not await passes(other.charge_image_tokens(client("b"), 60))
    assert all(key.startswith(b"askimage:") for key in redis.stored())
    await one.close()
    await other.close()


async def test_image_tokens_take_two_numbers_in_redis(redis: Redis) -> None:
    limits = limiter(redis.url, image_tokens="500000/minute")
    await limits.charge_image_tokens(client(), 400_000)
    with Connection(port=redis.port) as connection:
        assert [connection.strlen(key) for key in redis.stored()] == [6]
    await limits.close()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


async def test_a_dead_redis_lets_requests_through(redis: Redis, caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    limits = limiter(redis.url, registry, requests="1/minute", image_tokens="1/minute")
    await limits.admit(client())
    redis.kill()
    for _ in range(10):
        limits._next_try = 0  # the second is over: the storage is tried, and fails, again
        assert await limits.admit(client()) == []
        await limits.charge_image_tokens(client(), 1)
    assert registry.get_sample_value("askimage_rate_limit_storage_errors_total") == 20
    assert len(warnings(caplog)) == 1
    assert "requests go through unlimited" in warnings(caplog)[0]
    await limits.close()


async def test_a_dead_redis_refuses_requests_where_that_is_asked_for(redis: Redis) -> None:
    limits = limiter(redis.url, requests="9/minute", image_tokens="9/minute", fail_open=False)
    await limits.admit(client())
    redis.kill()
    for attempt in (limits.admit(client()), limits.admit(client()), limits.charge_image_tokens(client(), 1)):
        with pytest.raises(Overloaded) as caught:
            await attempt
        assert caught.value.detail == "the rate-limit storage does not answer"
        assert (caught.value.status, caught.value.retry_after) == (503, 5)
    await limits.close()


async def test_a_hung_redis_holds_up_one_request_and_then_none(
    redis: Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limits, "CALL_SECONDS", 30)  # the sockets' own patience is enough
    caplog.set_level(logging.INFO, "app.rate_limits")
    limits = limiter(redis.url, requests="2/minute")
    await limits.admit(client())
    redis.freeze()
    try:
        start = time.monotonic()
        await limits.admit(client())
        first = time.monotonic() - start
        for _ in range(100):
            await limits.admit(client())
        others = time.monotonic() - start - first
        assert 0.1 < first < 0.7
        assert others < 0.1
    finally:
        redis.thaw()

    async def holds() -> bool:
        return not await passes(limits.admit(client()))

    await until(holds, 5, "limits hold again")
    assert [record.message for record in caplog.records if record.levelno == logging.INFO] == [
        "the rate-limit storage answers again"
    ]
    assert len(warnings(caplog)) == 1
    await limits.close()


async def test_while_redis_hangs_one_request_a_second_waits_for_it(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = limiter(redis.url, requests="2/minute")
    redis.freeze()
    try:
        await limits.admit(client())
        limits._next_try = 0  # the second is over
        asked = 0
        real = limits._hit

        async def counted(*args: object) -> object:
            nonlocal asked
            asked += 1
            return await real(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(limits, "_hit", counted)
        await asyncio.gather(*(limits.admit(client()) for _ in range(50)))
        assert asked == 1
    finally:
        redis.thaw()
    await limits.close()


async def test_limits_hold_again_after_redis_was_started_anew(redis: Redis) -> None:
    limits = limiter(redis.url, requests="1/minute")
    await limits.admit(client())
    redis.kill()
    assert await limits.admit(client()) == []
    redis.start()

    async def holds() -> bool:
        return not await passes(limits.admit(client()))

    await until(holds, 5, "limits hold again")
    await limits.close()


async def test_a_whole_call_is_bounded_in_time(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> tuple[float, int]:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(RedisStorage, "get_moving_window", never)
    limits = limiter(redis.url, requests="1/minute")
    start = time.monotonic()
    assert await limits.admit(client()) == []
    assert time.monotonic() - start < 1
    await limits.close()


@pytest.mark.parametrize("text", ["ten/minute", "10", "10/fortnight", "10/minute;", "-1/minute"])
@pytest.mark.parametrize("field", ["requests", "image_tokens"])
def test_limits_that_cannot_be_read_are_named(field: str, text: str) -> None:
    with pytest.raises(SettingsError, match=f"ASKIMAGE_LIMITS__{field.upper()}: limits look like") as caught:
        limiter(**{field: text})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "localhost:6379",
        "redis://:hunter2@localhost/0",
        "redis://x:hunter2/0",
        "memcached://hunter2:1",
        "redis",
        "redis+cluster://hunter2:1",
        "redis://:hunter2@localhost:1/0?socket_timeot=1",
    ],
)
def test_a_storage_that_cannot_be_used_is_named_without_its_password(url: str) -> None:
    with pytest.raises(SettingsError, match="ASKIMAGE_LIMITS__STORAGE_URL") as caught:
        limiter(url)
    assert "hunter2" not in str(caught.value)


def test_empty_settings_are_no_limits() -> None:
    limiter("", requests="", image_tokens="")


async def test_this_process_forgets_clients_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_windows, "SWEEP_SECONDS", 0.05)
    memory = rate_windows.Memory()
    try:
        for name in ("a", "b"):
            assert await memory.acquire_entry(name, 10, 1)
            await memory.incr(f"{name}-tokens", 1)
        assert await memory.acquire_entry("here", 10, 60)
        async with asyncio.timeout(5):
            while memory.events.keys() != {"here"} or memory.storage or memory.expirations:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert set(memory.locks) == {"here"}
    finally:
        assert memory.timer is not None
        memory.timer.cancel()
