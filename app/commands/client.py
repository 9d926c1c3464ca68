"""What the commands that talk to a running service share: its address, the key, its errors."""

import sys
from typing import Annotated

import httpx
import typer

Url = Annotated[str, typer.Option(help="Where the service is.")]
Key = Annotated[
    str | None,
    typer.Option(envvar="ASKIMAGE_AUTH__KEY", help="Key; the variable keeps it out of the shell history."),
]

DEFAULT_URL = "http://127.0.0.1:8000"


def with_scheme(url: str) -> str:
    """`localhost:8000` as people write it is a host and a port here, not a scheme and a path."""
    return url if "://" in url else f"http://{url}"


def authorization(key: str | None) -> dict[bytes, bytes]:
    """The header for a key, in bytes, because httpx takes text for ASCII; leaves with a message when it is none."""
    if key is None:
        return {}
    if key.split() != [key] or not key.isprintable():
        sys.exit("askimage: the key (--key or ASKIMAGE_AUTH__KEY) is empty, or has a space or line break in it")
    return {b"Authorization": f"Bearer {key}".encode()}


def problem(response: httpx.Response) -> str:
    """One line for an answer that is no success."""
    try:
        document = response.json()
        return f"{response.status_code} {document['title']}: {document['detail']}"
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code}: {response.text[:500]}"
