"""`askimage ask`: a question about images, from the terminal."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from app.commands.client import DEFAULT_URL, Key, Url, authorization, problem, with_scheme

console = Console(highlight=False, soft_wrap=True)

_NO_ANSWER = "(the output ended inside the thinking; allow more with --max-tokens)"


def ask(
    words: Annotated[list[str], typer.Argument(metavar="IMAGE... QUESTION", help="Image files, then the question.")],
    url: Url = DEFAULT_URL,
    stream: Annotated[bool, typer.Option("--stream", help="Show reasoning and answer as they come.")] = False,
    thinking: Annotated[str, typer.Option(help="`auto`, or `off` for an answer at once.")] = "auto",
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of reasoning and answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    timeout: Annotated[int, typer.Option(min=1, help="Seconds to wait for the next byte.")] = 300,
    key: Key = None,
    priority: Annotated[str | None, typer.Option(help="Class of service: realtime, normal or batch.")] = None,
) -> None:
    """Ask a running service about one or several images; the reasoning is printed dimmed.

    Try: `askimage ask sign.png "What does the sign say?" --stream`
    """
    url = with_scheme(url)
    *paths, question = words
    if not paths:
        sys.exit("askimage: give at least one image file, then the question")
    missing = [path for path in paths if not Path(path).is_file()]
    if missing:
        sys.exit(f"askimage: no such file: {missing[0]}")
    fields: dict[str, Any] = {"question": question, "thinking": thinking, "stream": str(stream).lower()}
    fields |= {"max_tokens": max_tokens} if max_tokens is not None else {}
    fields |= {"temperature": temperature} if temperature is not None else {}
    headers = authorization(key)
    headers |= {b"X-Priority": priority.encode("utf-8", "surrogateescape")} if priority is not None else {}
    files = [("image", (Path(path).name, Path(path).read_bytes())) for path in paths]
    try:
        with (
            httpx.Client(base_url=url, timeout=timeout, headers=headers) as client,
            client.stream("POST", "/v1/ask", data=fields, files=files) as response,
        ):
            if response.status_code != 200:
                response.read()
                sys.exit(f"askimage: {problem(response)}")
            if stream:
                _print_stream(response)
            else:
                response.read()
                _print_reply(response.json())
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        sys.exit(f"askimage: no answer from {url}: {error} (is the service there? see --url)")
    except (ValueError, KeyError, TypeError):
        sys.exit(f"askimage: {url} answers, but not as this service does")


def _print_reply(reply: dict[str, Any]) -> None:
    if reply["reasoning"]:
        console.print(reply["reasoning"], style="dim", markup=False)
    if reply["answer"] is None:
        console.print(_NO_ANSWER, style="yellow")
    else:
        console.print(reply["answer"], markup=False)


def _print_stream(response: httpx.Response) -> None:
    last = ""
    for name, data in _events(response):
        if name == "error":
            sys.exit(f"\naskimage: {data['title']}: {data['detail']}")
        if name in {"reasoning", "answer"}:
            if last == "reasoning" and name == "answer":
                console.print()
            console.print(data["text"], style="dim" if name == "reasoning" else None, markup=False, end="")
            last = name
        if name == "done":
            console.print()
            if data["finish_reason"] == "thinking_length":
                console.print(_NO_ANSWER, style="yellow")
            return
    sys.exit("\naskimage: the stream broke off before its end")


def _events(response: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    """Server-sent events. Lines end with a line feed alone; httpx's own lines would also end inside some texts."""
    name, rest = "", ""
    for text in response.iter_text():
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, json.loads(line.removeprefix("data: "))
