"""`askimage top` against the real service, in a real (pseudo) terminal."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx
import pytest

from support import ROOT, free_port, metric, picture

COMMAND = (sys.executable, "-m", "app.cli", "top")


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


class Terminal:
    """`askimage top` in a terminal of 80 by 24."""

    def __init__(self, *arguments: str) -> None:
        self._terminal, inner = pty.openpty()
        size = {"COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
        self.process = subprocess.Popen(
            [*COMMAND, *arguments], cwd=ROOT, env=os.environ | size, stdin=inner, stdout=inner, stderr=inner
        )
        os.close(inner)
        self.shown = ""

    def wait_for(self, text: str, seconds: float = 30) -> None:
        """Wait until it is drawn; forget what came before it."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            if time.monotonic() > end:
                pytest.fail(f"not within {seconds} s: {text!r}; shown: {self.shown[-2000:]}")
            if select.select([self._terminal], [], [], 0.1)[0]:
                self.shown += re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", os.read(self._terminal, 1 << 16).decode())
        self.shown = self.shown.partition(text)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    window = Terminal(*arguments)
    try:
        yield window
    finally:
        window.close()


def test_once_as_json_has_the_figures_of_the_metrics(server: str) -> None:
    answer = httpx.post(f"{server}/v1/ask", files={"image": picture()}, data={"question": "What color is the circle?"})
    assert answer.status_code == 200
    run = top("--once", "--json", "--url", server)
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    page = httpx.get(f"{server}/metrics").text
    normal = told["classes"]["normal"]
    ended = metric(page, "askimage_requests_total", **{"class": "normal"})
    assert normal["questions_per_second"] * told["window_seconds"] == pytest.approx(ended)
    assert normal["slots_used"] == normal["waiting"] == 0
    assert normal["seconds"]["request"]["p50"] > 0
    assert told["kv_cache_tokens"] == metric(page, "askimage_kv_cache_tokens")
    assert told["slots"] == metric(page, "askimage_slots")
    assert (told["state"], told["device"]) == ("ready", "cpu")


def test_once_prints_a_page(server: str) -> None:
    run = top("--once", "--url", server.removeprefix("http://"))
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("ready  ")
    assert "to first token" in run.stdout


def test_live_until_ctrl_c(server: str) -> None:
    with terminal("--url", server, "--interval", "0.2") as window:
        window.wait_for("ready  ")
        window.wait_for("over the last 0:00:01")
        window.process.send_signal(signal.SIGINT)
        assert window.process.wait(10) == 0


def test_an_outage_is_shown_beside_the_last_figures() -> None:
    pages = [("ready", 200), ("ready", 503), ("draining", 200)]

    class Service(BaseHTTPRequestHandler):
        """A stand-in: the session's service must not fail."""

        def do_GET(self) -> None:
            state, status = pages.pop(0) if len(pages) > 1 else pages[0]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(f'askimage_engine_state{{state="{state}"}} 1\n'.encode())

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    service = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    Thread(target=service.serve_forever, daemon=True).start()
    with terminal("--url", f"127.0.0.1:{service.server_port}", "--interval", "0.2") as window:
        window.wait_for("ready  ")
        window.wait_for("ready  ")
        window.wait_for("since ")
        window.wait_for("says 503")
        window.wait_for("draining  ")
        service.shutdown()
        service.server_close()
        window.wait_for("no answer from")
        assert window.process.poll() is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "--once", "--url", f"127.0.0.1:{free_port()}"], "no answer from http://127.0.0.1"),
        (["--json"], "goes with --once"),
        ([], "needs a terminal"),
        (["--once", "--url", "http://[::1"], "is no address"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], message: str) -> None:
    run = top(*arguments)
    assert run.returncode != 0
    assert message in run.stderr
    assert "Traceback" not in run.stderr
