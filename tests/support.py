"""What tests share: starting the real service, waiting, pictures."""

import io
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from PIL import Image, ImageDraw
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 150


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def serve(model: Path, log: Path, **environment: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run `askimage serve` in a process of its own; yields its address before the model is loaded."""
    port = free_port()
    variables = {"ASKIMAGE_MODEL__PATH": str(model), "ASKIMAGE_SERVER__PORT": str(port), **environment}
    command = [sys.executable, "-m", "app.cli", "serve"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | variables, stdout=output, stderr=output)
        try:
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until `condition` holds; fail the test when it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"not within {seconds} s: {what}")
        time.sleep(0.05)


def answers(url: str, status: int) -> bool:
    """Does `url` answer with `status` now?"""
    try:
        return httpx.get(url, timeout=10).status_code == status
    except httpx.HTTPError:
        return False


def picture(width: int = 112, height: int = 112, **save: object) -> bytes:
    """A red circle on white, as a file."""
    image = Image.new("RGB", (width, height), "white")
    radius = min(width, height) / 3
    box = (width / 2 - radius, height / 2 - radius, width / 2 + radius, height / 2 + radius)
    ImageDraw.Draw(image).ellipse(box, fill=(215, 35, 40))
    file = io.BytesIO()
    image.save(file, **({"format": "PNG"} | save))
    return file.getvalue()


def metric(page: str, name: str, **labels: str) -> float:
    """A value on a metrics page; 0 when it is not there yet."""
    total = 0.0
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                total += sample.value
    return total
