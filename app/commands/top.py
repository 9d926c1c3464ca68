"""`askimage top`: what a running service is doing, live."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.live import Live

from app.commands.client import DEFAULT_URL, Key, Url, authorization, problem, with_scheme
from app.commands.top_snapshot import Reading, Snapshot, Window, snapshot
from app.commands.top_view import screen

WINDOW_SECONDS = 30.0
TIMEOUT_SECONDS = 5.0


class Unreadable(Exception):
    """The metrics could not be read; the text says what to do."""


def top(
    url: Url = DEFAULT_URL,
    key: Key = None,
    interval: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two readings.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the figures since the start of the service, and end.")] = (
        False
    ),
    as_json: Annotated[bool, typer.Option("--json", help="With --once: JSON in base units, for scripts.")] = False,
) -> None:
    """Show what a running service is doing: classes, queues, latencies, tokens/s, caches, GPUs. Ctrl-C ends it.

    Try: `askimage top --once --json | jq .classes.normal.waiting`
    """
    if as_json and not once:
        raise typer.BadParameter("goes with --once", param_hint="--json")
    if not once and not sys.stdout.isatty():
        sys.exit("askimage: the live view needs a terminal; print the figures with --once")
    headers = authorization(key)
    try:
        client = httpx.Client(base_url=with_scheme(url), timeout=TIMEOUT_SECONDS, headers=headers)
    except httpx.InvalidURL as error:
        sys.exit(f"askimage: {url} is no address: {error}")
    with client:
        if not once:
            _live(lambda: read(client), interval)
            return
        try:
            now = snapshot(read(client))
        except Unreadable as error:
            sys.exit(f"askimage: {error}")
        if as_json:
            print(json.dumps(asdict(now)))
        else:
            Console(highlight=False).print(screen(now))


def read(client: httpx.Client) -> Reading:
    """The service's metrics now.

    Raises:
        Unreadable: There is no service, or it does not show them.
    """
    where = str(client.base_url).rstrip("/")
    try:
        response = client.get("/metrics")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unreadable(
            f"no answer from {where}: {str(error) or type(error).__name__} (is it there? see --url)"
        ) from None
    if response.status_code == 404:
        raise Unreadable(
            f"{where} shows no metrics: they are on another port (ASKIMAGE_SERVER__OPERATIONS_PORT; see --url) or "
            "closed (ASKIMAGE_SERVER__METRICS)"
        )
    if response.status_code == 401:
        raise Unreadable(f"{where} asks for a key: give one with --key or ASKIMAGE_AUTH__KEY")
    if response.status_code != 200:
        raise Unreadable(f"{where} says {problem(response)}")
    try:
        return Reading(response.text, time.time())
    except (ValueError, KeyError):
        raise Unreadable(f"{where} answers, but not as this service does") from None


def _live(read: Callable[[], Reading], interval: float) -> None:
    """Draw until Ctrl-C; through an outage the last figures stay."""
    window = Window(WINDOW_SECONDS)
    last: Snapshot | None = None
    lost = ""
    try:
        with Live(screen=True, auto_refresh=False) as live:
            while True:
                began = time.monotonic()
                try:
                    last, lost = window.add(read()), ""
                    live.update(screen(last), refresh=True)
                except Unreadable as error:
                    lost = lost or time.strftime("%H:%M:%S")
                    trouble = f"since {lost}: {error}"
                    live.update(screen(last, trouble) if last else trouble, refresh=True)
                time.sleep(max(0.05, interval - (time.monotonic() - began)))
    except KeyboardInterrupt:
        return
