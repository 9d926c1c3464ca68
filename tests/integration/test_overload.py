"""More clients than the service can queue: each gets an answer, or learns when to come back; and it all goes on."""

import asyncio

import httpx

from support import metric, picture


async def test_everyone_in_a_flood_is_answered_or_told_when_to_come_back(client: httpx.AsyncClient) -> None:
    file = picture()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=client.base_url, timeout=120, limits=limits) as flood:

        async def ask() -> httpx.Response:
            data = {"question": "What do you see?", "max_tokens": "4"}
            return await flood.post("/v1/ask", data=data, files={"image": file}, headers={"X-Priority": "batch"})

        replies = await asyncio.gather(*(ask() for _ in range(300)))
    served = [reply for reply in replies if reply.status_code == 200]
    refused = [reply for reply in replies if reply.status_code != 200]
    assert len(served) >= 50
    assert {(reply.status_code, reply.json()["code"]) for reply in refused} == {(503, "queue_full")}
    assert all(1 <= int(reply.headers["retry-after"]) <= 300 for reply in refused)
    page = (await client.get("/metrics")).text
    assert metric(page, "askimage_slots_used") == 0
    assert metric(page, "askimage_waiting") == 0
    assert (await client.post("/v1/ask", data={"question": "?"}, files={"image": file})).status_code == 200


async def test_a_bad_class_and_a_class_that_is_free_to_all_here(client: httpx.AsyncClient) -> None:
    ask = {"data": {"question": "?", "max_tokens": "4"}, "files": {"image": picture()}}
    bad = await client.post("/v1/ask", headers={"X-Priority": "vip"}, **ask)  # type: ignore[arg-type]
    assert (bad.status_code, bad.json()["code"]) == (400, "malformed_request")
    realtime = await client.post("/v1/ask", headers={"X-Priority": "realtime"}, **ask)  # type: ignore[arg-type]
    assert realtime.status_code == 200
