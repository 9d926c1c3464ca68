"""Clients: pictures that differ, questions about them, how long each answer took."""

import asyncio
import base64
import io
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
from PIL import Image, ImageDraw

from benchmarks.servers import Server

MOST_PATIENCE = 5.0  # seconds of Retry-After that a client obeys
OPENAI_PRIORITIES = {"realtime": 0, "normal": 10, "batch": 20}


def pictures(count: int, size: int, seed: int = 0) -> list[bytes]:
    """JPEG files that no cache has seen: coloured shapes at random places."""
    draw = random.Random(seed)
    files = []
    for _ in range(count):
        image = Image.new("RGB", (size, size), tuple(draw.randrange(256) for _ in range(3)))
        for _ in range(8):
            x, y, r = draw.randrange(size), draw.randrange(size), draw.randrange(size // 16, size // 4)
            colour = tuple(draw.randrange(256) for _ in range(3))
            ImageDraw.Draw(image).ellipse((x - r, y - r, x + r, y + r), fill=colour)
        file = io.BytesIO()
        image.save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files


@dataclass(slots=True)
class Outcomes:
    """What a group of clients met.

    Attributes:
        seconds: Latencies of the answers (status 200).
        began: When each of these questions was sent, monotonic seconds.
        statuses: How often each status came; 0 is a broken connection.
    """

    seconds: list[float] = field(default_factory=list)
    began: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    def since(self, moment: float) -> "Outcomes":
        """Those of questions that were sent after a moment; statuses are kept whole."""
        kept = [(s, b) for s, b in zip(self.seconds, self.began, strict=True) if b >= moment]
        return Outcomes([s for s, _ in kept], [b for _, b in kept], self.statuses)

    def percentile(self, percent: int) -> float:
        """Latency in seconds; NaN without answers."""
        if len(self.seconds) < 2:
            return self.seconds[0] if self.seconds else float("nan")
        return statistics.quantiles(self.seconds, n=100, method="inclusive")[percent - 1]


async def ask(
    http: aiohttp.ClientSession, server: Server, image: bytes, priority: str, tokens: int
) -> tuple[int, float, float]:
    """One question; (status, seconds it took, seconds to wait before the next)."""
    began = time.monotonic()
    try:
        if server.openai:
            url = f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"
            content = [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "text", "text": "What do you see?"},
            ]
            body = {
                "model": server.model,
                "messages": [{"role": "user", "content": content}],
                "max_tokens": tokens,
                "temperature": 0,
                "priority": OPENAI_PRIORITIES[priority],
            }
            request = http.post(f"{server.url}/v1/chat/completions", json=body)
        else:
            form = aiohttp.FormData({"question": "What do you see?", "max_tokens": str(tokens), "temperature": "0"})
            form.add_field("image", image, filename="image.jpg")
            request = http.post(f"{server.url}/v1/ask", data=form, headers={"X-Priority": priority})
        async with request as response:
            await response.read()
            return response.status, time.monotonic() - began, float(response.headers.get("retry-after", 0))
    except aiohttp.ClientError:
        return 0, time.monotonic() - began, 1.0


async def closed_loop(
    server: Server,
    images: Sequence[bytes],
    *,
    clients: int,
    priority: str,
    tokens: int,
    until: asyncio.Event,
    pause: float = 0.0,
) -> Outcomes:
    """`clients` that ask again when they have their answer (and paused), until the event; what began is finished."""
    outcomes = Outcomes()
    turn = iter(range(1 << 62))

    async def client(http: aiohttp.ClientSession) -> None:
        while not until.is_set():
            status, seconds, wait = await ask(http, server, images[next(turn) % len(images)], priority, tokens)
            outcomes.statuses[status] += 1
            if status == 200:
                outcomes.seconds.append(seconds)
                outcomes.began.append(time.monotonic() - seconds)
            # A client that is told when to come back does so, a little later than its neighbour.
            await asyncio.sleep(pause + min(wait, MOST_PATIENCE) * random.uniform(1, 1.5))

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        await asyncio.gather(*(client(http) for _ in range(clients)))
    return outcomes
