"""Start the servers that are compared, one at a time, each in a process of its own."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 400


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is ready.

    Attributes:
        name: For tables.
        url: Its address.
        pid: Its process; the engine's processes are children.
        openai: Asked by OpenAI's chat completions, else by `/v1/ask`.
        model: Name of the model in requests.
    """

    name: str
    url: str
    pid: int
    openai: bool
    model: str


@contextmanager
def askimage(model: str, log: Path, *, module: str = "app.cli", **settings: str) -> Iterator[Server]:
    """Our service, started by `module`; `settings` are its variables without their prefix."""
    port = _free_port()
    variables = {f"ASKIMAGE_{name}": value for name, value in settings.items()}
    variables |= {"ASKIMAGE_MODEL__PATH": model, "ASKIMAGE_SERVER__PORT": str(port)}
    with _process([sys.executable, "-m", module, "serve"], variables, log, port, "/readyz") as process:
        yield Server("askimage", f"http://127.0.0.1:{port}", process.pid, False, Path(model).name)


@contextmanager
def vllm(model: str, log: Path, *arguments: str) -> Iterator[Server]:
    """vLLM's own OpenAI server; `arguments` are its options. Kimi-VL needs this package's plugin to load there."""
    port = _free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", Path(model).name, *arguments]
    with _process(command, {"VLLM_NO_USAGE_STATS": "1"}, log, port, "/health") as process:
        yield Server("vllm serve", f"http://127.0.0.1:{port}", process.pid, True, Path(model).name)


@contextmanager
def _process(
    command: list[str], variables: dict[str, str], log: Path, port: int, ready: str
) -> Iterator["subprocess.Popen[bytes]"]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | variables, stdout=output, stderr=output)
        try:
            _wait_until_ready(process, f"http://127.0.0.1:{port}{ready}", log)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
    sys.exit(f"the server did not become ready; the end of {log}:\n{log.read_text()[-3000:]}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
