"""A thousand clients at once: is everyone answered, is memory bounded, does the liveness probe stay quick?

usage: python -m benchmarks.overload [--clients 1000] [--seconds 20]
"""

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import aiohttp
import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import servers
from benchmarks.load import closed_loop, pictures
from benchmarks.servers import ROOT, Server


def probe(url: str, until: threading.Event) -> list[float]:
    """Seconds of each liveness probe, ten in a second, and nothing but 200.

    In a process of its own: the thousand clients keep the event loop here busy too.
    """
    seconds = []
    with httpx.Client() as http:
        while not until.is_set():
            began = time.monotonic()
            http.get(f"{url}/livez", timeout=30).raise_for_status()
            seconds.append(time.monotonic() - began)
            time.sleep(0.1)
    return seconds


async def lag(server: Server) -> dict[str, float]:
    """Cumulative counts of the event loop's lag by upper bound."""
    async with aiohttp.ClientSession() as http, http.get(f"{server.url}/metrics") as response:
        page = await response.text()
    return {
        sample.labels["le"]: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "askimage_event_loop_lag_seconds_bucket"
    }


async def watch_memory(pid: int, until: asyncio.Event) -> list[int]:
    """Resident bytes of the service process, four times a second."""
    process, readings = psutil.Process(pid), []
    while not until.is_set():
        readings.append(process.memory_info().rss)
        await asyncio.sleep(0.25)
    return readings


async def overload(server: Server, options: argparse.Namespace) -> None:
    files = pictures(256, options.size)
    done, over = asyncio.Event(), asyncio.Event()
    before = await lag(server)
    processes, probing = ProcessPoolExecutor(1), multiprocessing.Manager().Event()
    async with asyncio.TaskGroup() as tasks:
        probes = asyncio.get_running_loop().run_in_executor(processes, probe, server.url, probing)
        memory = tasks.create_task(watch_memory(server.pid, over))
        clients = tasks.create_task(
            closed_loop(server, files, clients=options.clients, priority="normal", tokens=options.tokens, until=done)
        )
        await asyncio.sleep(options.seconds)
        done.set()
        outcomes = await clients
        over.set()
        probing.set()
    after = await lag(server)
    seconds, rss = await probes, memory.result()
    print(f"{options.clients} clients, {options.size}² JPEG, {options.tokens} tokens, {options.seconds:g} s")
    print(f"answers by status: {dict(sorted(outcomes.statuses.items()))}")
    print(f"answered: p50 {outcomes.percentile(50):.2f} s, p99 {outcomes.percentile(99):.2f} s")
    p99 = statistics.quantiles(seconds, n=100)[98]
    print(
        f"livez: {len(seconds)} probes, p50 {statistics.median(seconds) * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms, "
        f"max {max(seconds) * 1e3:.0f} ms"
    )
    counts = {bound: after[bound] - before.get(bound, 0) for bound in after}
    total = counts["+Inf"]
    print(
        "loop lag above "
        + ", ".join(f"{b} s: {total - counts[b]:.0f}" for b in counts if b != "+Inf")
        + f" of {total:.0f}"
    )
    begin, most, end = (value >> 20 for value in (rss[0], max(rss), rss[-1]))
    print(f"service RSS: {begin} MiB before, {most} MiB at most, {end} MiB after")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "demo_model"))
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--tokens", type=int, default=8)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        servers.askimage(options.model, Path(folder) / "log") as server,
    ):
        asyncio.run(overload(server, options))


if __name__ == "__main__":
    main()
