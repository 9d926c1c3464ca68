"""What a flood of batch requests does to everyone else's latency, here and in vLLM's own server.

A few realtime and normal clients ask and pause; then a flood of batch clients that never pause comes. Goal: realtime's
p99 under the flood is at most twice its own without.

usage: python -m benchmarks.fairness [--model FOLDER] [--peer] [--seconds 30] [--flood 64] [--size 224] [--tokens 16]
"""

import argparse
import asyncio
import json
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path

from app.engine.arguments import DEVICE_DEFAULTS, device_type
from benchmarks import servers
from benchmarks.load import Outcomes, closed_loop, pictures
from benchmarks.servers import ROOT, Server

PAUSE_SECONDS = 0.2
SETTLE_SECONDS = 3.0


async def measure(server: Server, options: argparse.Namespace, flood: int) -> dict[str, Outcomes]:
    """Latencies by class, with `flood` batch clients beside the others."""
    files = pictures(2048, options.size, seed=flood)
    done = asyncio.Event()
    groups = {"realtime": options.realtime, "normal": options.normal}
    share = {"tokens": options.tokens}
    async with asyncio.TaskGroup() as tasks:
        running = {
            name: tasks.create_task(
                closed_loop(server, files, clients=count, priority=name, until=done, pause=PAUSE_SECONDS, **share)
            )
            for name, count in groups.items()
        }
        await asyncio.sleep(SETTLE_SECONDS)
        began = time.monotonic()
        batch = tasks.create_task(closed_loop(server, files, clients=flood, priority="batch", until=done, **share))
        await asyncio.sleep(options.seconds)
        done.set()
        results = {name: (await task).since(began) for name, task in running.items()}
        return results | ({"batch": await batch} if flood else {})


async def compare(server: Server, options: argparse.Namespace) -> dict[str, object]:
    """Print the table of one server; returns its figures."""
    await measure(server, argparse.Namespace(**(vars(options) | {"seconds": 3})), 0)  # warm-up
    alone, flooded = await measure(server, options, 0), await measure(server, options, options.flood)
    figures: dict[str, object] = {}
    print(f"\n{server.name}: {options.size}² JPEG, {options.tokens} tokens, flood of {options.flood} batch clients")
    print(
        f"{'class':10}{'alone':>8}{'p50 ms':>9}{'p99 ms':>9}{'flooded':>10}{'p50 ms':>9}{'p99 ms':>9}{'p99 ratio':>11}"
    )
    for name, after in flooded.items():
        before = alone.get(name, Outcomes())
        columns = [
            [len(each.seconds), each.percentile(50) * 1e3, each.percentile(99) * 1e3] for each in (before, after)
        ]
        ratio = columns[1][2] / columns[0][2]
        (n, p50, p99), (m, q50, q99) = columns
        print(f"{name:10}{n:>8}{p50:>9.0f}{p99:>9.0f}{m:>10}{q50:>9.0f}{q99:>9.0f}{ratio:>11.2f}")
        refused = {status: count for status, count in after.statuses.items() if status != 200}
        if refused:
            print(f"{'':10}refused: {refused}")
        figures[name] = {"alone": columns[0], "flooded": columns[1], "p99_ratio": ratio, "refused": refused}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "demo_model"))
    parser.add_argument("--peer", action="store_true", help="measure vLLM's own server too")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--flood", type=int, default=64)
    parser.add_argument("--realtime", type=int, default=4)
    parser.add_argument("--normal", type=int, default=2)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--engine", default="{}", help="engine arguments for both servers, as JSON")
    options = parser.parse_args()
    # Both servers get what ours takes by default on this device: vLLM's own would not start, or not compare.
    arguments = DEVICE_DEFAULTS[device_type()] | json.loads(options.engine)
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        ours = {f"ENGINE__{k.upper()}": v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
        starts: list[AbstractContextManager[Server]] = [servers.askimage(options.model, logs / "askimage", **ours)]
        if options.peer:
            starts.append(servers.vllm(options.model, logs / "vllm", *_vllm_options(arguments)))
        figures = {}
        for start in starts:
            with start as server:
                figures[server.name] = asyncio.run(compare(server, options))
    print(json.dumps(figures))


def _vllm_options(arguments: dict[str, object]) -> list[str]:
    options = ["--scheduling-policy", "priority", "--no-enable-log-requests"]
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            options.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            options += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return options


if __name__ == "__main__":
    main()
