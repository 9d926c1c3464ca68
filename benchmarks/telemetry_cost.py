"""What telemetry costs: throughput with all of it (series, a scrape every 5 s, log lines, every request traced to a
collector) beside throughput with none of it.

Both services run at once and are asked in turns, so that what else the machine does meets both. Goal: less than 2%.

usage: python -m benchmarks.telemetry_cost [--pairs 20] [--seconds 8] [--clients 32] [--engine JSON]
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp

from benchmarks import servers
from benchmarks.load import closed_loop, pictures
from benchmarks.servers import ROOT, Server

SCRAPE_SECONDS = 5


class Collector(BaseHTTPRequestHandler):
    """Takes spans and forgets them."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.server.taken += len(self.rfile.read(int(self.headers["content-length"])))  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        body = str(self.server.taken).encode()  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def collect(port: Connection) -> None:
    """Run a collector, in a process of its own; tells its port."""
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    collector.taken = 0  # type: ignore[attr-defined]
    port.send(collector.server_port)
    collector.serve_forever()


async def scrape(server: Server) -> None:
    """Read the metrics as Prometheus does, until cancelled."""
    async with aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"{server.url}/metrics") as response:
                response.raise_for_status()
                await response.read()
            await asyncio.sleep(SCRAPE_SECONDS)


async def throughput(server: Server, files: Sequence[bytes], options: argparse.Namespace) -> float:
    """Answers per second of `clients` that never pause."""
    done = asyncio.Event()
    load = {"clients": options.clients, "priority": "normal", "tokens": options.tokens, "until": done}
    began = time.monotonic()
    asking = asyncio.create_task(closed_loop(server, files, **load))
    await asyncio.sleep(options.seconds)
    done.set()
    outcomes = await asking
    if set(outcomes.statuses) != {200}:
        raise SystemExit(f"{server.name}: not every question was answered: {dict(outcomes.statuses)}")
    return len(outcomes.seconds) / (time.monotonic() - began)


async def compare(full: Server, bare: Server, collector: str, options: argparse.Namespace) -> None:
    """Print the ratios of the pairs."""
    ratios, speeds = [], {"with": [], "without": []}
    for turn in range(-1, options.pairs):  # the first pair warms up
        files = pictures(1024, options.size, seed=turn)
        pair = {}
        order = [("with", full), ("without", bare)]
        for name, server in order if turn % 2 else reversed(order):
            scraping = asyncio.create_task(scrape(server)) if name == "with" else None
            pair[name] = await throughput(server, files, options)
            if scraping is not None:
                scraping.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await scraping
        if turn >= 0:
            ratios.append(pair["with"] / pair["without"])
            for name, speed in pair.items():
                speeds[name].append(speed)
    async with aiohttp.ClientSession() as http, http.get(collector) as response:
        taken = int(await response.text())
    if not taken:
        raise SystemExit("no spans came to the collector")
    mean, error = statistics.mean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5
    print(f"{options.clients} clients, {options.size}² JPEG, {options.tokens} tokens, {options.pairs} pairs")
    print("answers/s: " + ", ".join(f"{name} {statistics.mean(values):.2f}" for name, values in speeds.items()))
    print(f"with telemetry / without: mean {mean:.4f} ± {1.96 * error:.4f}, median {statistics.median(ratios):.4f}")
    print(f"spans: {taken >> 10} KiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "demo_model"))
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--engine", default="{}", help="engine arguments for both services, as JSON")
    options = parser.parse_args()
    engine = json.loads(options.engine)
    settings = {f"ENGINE__{k.upper()}": v if isinstance(v, str) else json.dumps(v) for k, v in engine.items()}
    ours, theirs = multiprocessing.Pipe()
    collecting = multiprocessing.Process(target=collect, args=(theirs,), daemon=True)
    collecting.start()
    collector = f"http://127.0.0.1:{ours.recv()}/v1/traces"
    traced = {"TRACING__ENDPOINT": collector}
    unobserved = {"ENGINE__ENABLE_LOGGING_ITERATION_DETAILS": "false"}
    with (
        tempfile.TemporaryDirectory() as folder,
        servers.askimage(options.model, Path(folder) / "full", **settings, **traced) as full,
        servers.askimage(
            options.model, Path(folder) / "bare", module="benchmarks.bare", **settings, **unobserved
        ) as bare,
    ):
        asyncio.run(compare(full, bare, collector, options))


if __name__ == "__main__":
    main()
