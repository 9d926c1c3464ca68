"""Requests of a burst begin a few in each turn of the loop, in order, and the probes do not wait for them."""

import asyncio

from app.middleware.pace import PER_TURN, PaceMiddleware


async def test_a_burst_is_spread_over_turns_of_the_loop() -> None:
    begun: list[str] = []

    async def app(scope: dict[str, str], receive: object, send: object) -> None:
        begun.append(scope["name"])

    paced = PaceMiddleware(app)  # type: ignore[arg-type]

    def request(name: str, path: str = "/v1/ask") -> asyncio.Task[None]:
        return asyncio.create_task(paced({"type": "http", "path": path, "name": name}, None, None))  # type: ignore[arg-type]

    names = [str(number) for number in range(5 * PER_TURN)]
    burst = [request(name) for name in names]
    burst[2 * PER_TURN].cancel()  # one that leaves does not use up a turn
    probe = request("probe", "/livez")
    counts = []
    while not all(task.done() for task in burst):
        before = len(begun)
        await asyncio.sleep(0)
        counts.append(len(begun) - before)
    await probe
    assert max(counts) <= PER_TURN + 1
    assert begun.index("probe") <= PER_TURN
    begun.remove("probe")
    assert begun == [name for name in names if name != str(2 * PER_TURN)]
