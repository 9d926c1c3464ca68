"""Clients that leave, engines that die, services that are told to end: for real, on services of their own."""

import asyncio
import contextlib
import json
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support import START_SECONDS, answers, metric, picture, serve, wait_for

LONG = json.dumps({"type": "string", "minLength": 1500, "maxLength": 1600})
ENDLESS = {"question": "What do you see?", "json_schema": LONG, "max_tokens": "1900"}
SHORT = {"question": "What do you see?", "max_tokens": "4"}


@dataclass
class Service:
    address: str
    process: "subprocess.Popen[bytes]"
    log: Path

    @property
    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.address, timeout=120)

    def metric(self, name: str, **labels: str) -> float:
        return metric(httpx.get(f"{self.address}/metrics").text, name, **labels)

    @property
    def slots_used(self) -> float:
        return self.metric("askimage_slots_used")

    async def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        await asyncio.to_thread(wait_for, condition, seconds, what)

    async def quiet(self) -> None:
        """Nothing of an abandoned request is left, within a second."""
        await self.until(lambda: self.slots_used == 0 and self.metric("askimage_running") == 0, 1.5, "nothing is left")


@contextlib.contextmanager
def service(model: Path, folder: Path, **settings: str) -> Iterator[Service]:
    with serve(model, folder / "log", **settings) as (address, process):
        wait_for(lambda: answers(f"{address}/readyz", 200), START_SECONDS, "the server is ready")
        yield Service(address, process, folder / "log")


@pytest.fixture(scope="module")
def crowded(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with two slots."""
    settings = {"ASKIMAGE_ADMISSION__MAX_RUNNING": "2", "ASKIMAGE_ADMISSION__QUEUE_TIMEOUT_BATCH": "0.5"}
    settings |= {"ASKIMAGE_SERVER__DRAIN_TIMEOUT": "4", "ASKIMAGE_SERVER__IDLE_TIMEOUT": "2"}
    with service(model_dir, tmp_path_factory.mktemp("crowded"), **settings) as running:
        yield running


async def abandoned(work: Awaitable[Any], begun: Callable[[], Awaitable[None]]) -> None:
    """Start a request, and close its connection once `begun`."""
    task = asyncio.ensure_future(work)
    try:
        await begun()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def streaming(client: httpx.AsyncClient, **fields: str) -> AsyncIterator[AsyncIterator[str]]:
    """A stream whose first delta has come; gives its lines."""
    data = ENDLESS | {"stream": "true"} | fields
    async with client.stream("POST", "/v1/ask", data=data, files={"image": picture()}) as response:
        lines = response.aiter_lines()
        async for line in lines:
            if line == "event: answer":
                break
        yield lines


async def test_a_client_that_leaves_while_it_uploads(crowded: Service) -> None:
    before = crowded.metric("askimage_cancellations_total", phase="upload")
    host, port = crowded.address.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = (
        "POST /v1/ask HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\nContent-Length: 99999\r\n"
    )
    writer.write(f"{head}\r\n--b\r\nContent-Disposition: form-data; name=image; filename=x\r\n\r\nabc".encode())
    await writer.drain()
    writer.close()
    await crowded.until(
        lambda: crowded.metric("askimage_cancellations_total", phase="upload") == before + 1, 1.5, "it is counted"
    )


@pytest.mark.parametrize("stream", ["false", "true"])
async def test_a_client_that_leaves_the_queue(crowded: Service, stream: str) -> None:
    before = crowded.metric("askimage_cancellations_total", phase="queue")
    async with crowded.client as client, streaming(client), streaming(client):

        async def queued() -> None:
            await crowded.until(lambda: crowded.metric("askimage_waiting", **{"class": "normal"}) == 1, 5, "it waits")

        ask = client.post("/v1/ask", data=SHORT | {"stream": stream}, files={"image": picture()})
        await abandoned(ask, queued)
        await crowded.until(lambda: crowded.metric("askimage_waiting", **{"class": "normal"}) == 0, 1.5, "it left")
        assert crowded.slots_used == 2
    await crowded.quiet()
    assert crowded.metric("askimage_cancellations_total", phase="queue") == before + 1


@pytest.mark.parametrize(
    ("phase", "pictures"), [("preprocess", [picture(7000, 7000)]), ("prefill", [picture(896, 896)])]
)
@pytest.mark.parametrize("stream", ["false", "true"])
async def test_a_client_that_leaves_before_the_first_token(
    crowded: Service, phase: str, pictures: list[bytes], stream: str
) -> None:
    before = crowded.metric("askimage_cancellations_total", phase=phase)
    prepared = crowded.metric("askimage_preprocess_seconds_count")
    async with crowded.client as client:

        async def begun() -> None:
            await crowded.until(lambda: crowded.slots_used == 1, 5, "it has a slot")
            if phase == "prefill":
                count = "askimage_preprocess_seconds_count"
                await crowded.until(lambda: crowded.metric(count) > prepared, 5, "its image is ready")

        files = [("image", each) for each in pictures]
        await abandoned(client.post("/v1/ask", data=ENDLESS | {"stream": stream}, files=files), begun)
    await crowded.quiet()
    assert crowded.metric("askimage_cancellations_total", phase=phase) == before + 1


async def test_a_client_that_leaves_a_stream(crowded: Service) -> None:
    before = crowded.metric("askimage_cancellations_total", phase="decode")
    async with crowded.client as client, streaming(client):
        assert crowded.slots_used == 1
    await crowded.quiet()
    assert crowded.metric("askimage_cancellations_total", phase="decode") == before + 1


async def test_a_client_that_leaves_before_its_json_is_complete(crowded: Service) -> None:
    before = crowded.metric("askimage_cancellations_total", phase="decode")
    generated = crowded.metric("vllm:generation_tokens_total")
    async with crowded.client as client:

        async def decoding() -> None:
            await crowded.until(
                lambda: crowded.metric("vllm:generation_tokens_total") > generated + 20, 20, "it decodes"
            )

        await abandoned(client.post("/v1/ask", data=ENDLESS, files={"image": picture()}), decoding)
    await crowded.quiet()
    assert crowded.metric("askimage_cancellations_total", phase="decode") == before + 1


async def test_a_wait_that_is_too_long_is_answered(crowded: Service) -> None:
    async with crowded.client as client, streaming(client), streaming(client):
        batch = {"X-Priority": "batch"}
        reply = await client.post("/v1/ask", data=SHORT, files={"image": picture()}, headers=batch)
        assert (reply.status_code, reply.json()["code"]) == (503, "queue_timeout")
        assert int(reply.headers["retry-after"]) >= 1
        # With the rate of what was served, a deadline that cannot be met is refused at once.
        began = time.monotonic()
        reply = await client.post("/v1/ask", data=SHORT | {"deadline_ms": "100"}, files={"image": picture()})
        assert (reply.status_code, reply.json()["code"]) == (504, "deadline_exceeded")
        assert "waiting" in reply.json()["detail"]
        assert time.monotonic() - began < 2
    await crowded.quiet()


async def test_a_peer_that_stalls_is_given_up(crowded: Service) -> None:
    host, port = crowded.address.removeprefix("http://").split(":")
    head = "POST /v1/ask HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    for sent, status in (
        (f"{head}Content-Length: 5000\r\n\r\n--b\r\n", "408"),
        (f"{head}Transfer-Encoding: chunked\r\n\r\n5\r\n--b\r\n\r\n", "408"),
        (head, None),  # half a head: no answer, but an end
        ("", None),
    ):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent.encode())
        async with asyncio.timeout(8):
            reply = await reader.read()
        assert (reply.split(b" ")[1].decode() if reply else None) == status
        writer.close()


async def test_a_drain_lets_work_finish_and_cuts_nothing_without_a_word(crowded: Service) -> None:
    async with crowded.client as client, streaming(client) as endless:
        quick = asyncio.ensure_future(
            client.post("/v1/ask", data=ENDLESS | {"max_tokens": "200"}, files={"image": picture()})
        )
        await crowded.until(lambda: crowded.slots_used == 2, 5, "both run")
        waiting = asyncio.ensure_future(client.post("/v1/ask", data=SHORT, files={"image": picture()}))
        await crowded.until(lambda: crowded.metric("askimage_waiting", **{"class": "normal"}) == 1, 5, "one waits")
        crowded.process.send_signal(signal.SIGTERM)
        await crowded.until(lambda: answers(f"{crowded.address}/readyz", 503), 1, "it says that it drains")
        assert answers(f"{crowded.address}/livez", 200)
        refused = await client.post("/v1/ask", data=SHORT, files={"image": picture()})
        assert (refused.status_code, refused.json()["code"]) == (503, "draining")
        assert refused.headers["retry-after"].isdecimal()
        assert (await quick).status_code == 200
        assert (await waiting).status_code == 200  # it was taken before the signal
        rest = [line async for line in endless]
    assert json.loads(rest[rest.index("event: error") + 1].removeprefix("data: "))["code"] == "draining"
    assert await asyncio.to_thread(crowded.process.wait, 15) == 0


async def test_a_dead_engine_is_started_again_and_then_ends_the_process(model_dir: Path, tmp_path: Path) -> None:
    settings = {"ASKIMAGE_ENGINE__RESTARTS": "1", "ASKIMAGE_SERVER__DEATH_GRACE": "2"}
    settings |= {"ASKIMAGE_ADMISSION__MAX_RUNNING": "1"}
    with service(model_dir, tmp_path, **settings) as served:
        for life, victim in enumerate(("EngineCore", "Worker")):
            async with served.client as client, streaming(client) as running:
                waiting = asyncio.ensure_future(client.post("/v1/ask", data=SHORT, files={"image": picture()}))
                await served.until(
                    lambda: served.metric("askimage_waiting", **{"class": "normal"}) == 1, 5, "one waits"
                )
                engine = psutil.Process(served.process.pid).children(recursive=True)
                killed = time.monotonic()
                next(child for child in engine if victim in child.name()).kill()
                rest = [line async for line in running]
                reply = await waiting
                assert time.monotonic() - killed < 2
            assert json.loads(rest[rest.index("event: error") + 1].removeprefix("data: "))["code"] == "engine_dead"
            assert (reply.status_code, reply.json()["code"]) == (503, "engine_dead")
            if life == 0:
                assert answers(f"{served.address}/livez", 200)
                await served.until(lambda: answers(f"{served.address}/readyz", 200), START_SECONDS, "it is back")
                async with served.client as client:
                    again = await client.post("/v1/ask", data=SHORT, files={"image": picture()})
                assert again.status_code == 200
        await served.until(lambda: answers(f"{served.address}/livez", 503), 1, "the liveness probe fails")
        health = await asyncio.to_thread(httpx.get, f"{served.address}/health")
        assert (health.status_code, health.json()["state"]) == (503, "dead")
        assert await asyncio.to_thread(served.process.wait, 15) == 70
        assert psutil.wait_procs(engine, timeout=5)[1] == []


async def test_a_second_signal_ends_now(model_dir: Path, tmp_path: Path) -> None:
    with service(model_dir, tmp_path) as served:
        async with served.client as client, streaming(client):
            engine = psutil.Process(served.process.pid).children(recursive=True)
            served.process.send_signal(signal.SIGTERM)
            await served.until(lambda: answers(f"{served.address}/readyz", 503), 1, "it drains")
            served.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(served.process.wait, 2) == 128 + signal.SIGTERM
        assert psutil.wait_procs(engine, timeout=5)[1] == []
