"""`askimage keys`: make keys, and show whose they are."""

import contextlib
import fcntl
import json
import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from app.identity import TIERS
from app.keyfile import Key, digest, parse_keys, read_keys
from app.settings import SettingsError, load_settings

keys = typer.Typer(name="keys", help="Make keys, and show whose they are.", no_args_is_help=True)

_File = Annotated[Path | None, typer.Option(help="File of keys; default: ASKIMAGE_AUTH__KEYS_FILE.")]


@keys.command()
def new(
    name: Annotated[str, typer.Argument(help="Whose key it is: letters, digits and `._-`.")],
    tier: Annotated[str, typer.Option(help="What it may do: premium, standard, bulk, or a tier of the file.")] = (
        "standard"
    ),
    file: _File = None,
    requests: Annotated[str | None, typer.Option(help="Its own limit, such as `120/minute;2000/hour`.")] = None,
    image_tokens: Annotated[str | None, typer.Option(help="Its own limit, such as `500000/minute`.")] = None,
) -> None:
    """Make a key, add its hash to the file of keys, and print the key once.

    A running service reads the file again within seconds. Without a file the entry is printed too, for pasting.

    Try: `askimage keys new phone-app --file keys.toml`
    """
    key = f"ask_{secrets.token_urlsafe(32)}"
    fields = {"name": name, "sha256": digest(key).hex(), "tier": tier}
    fields |= {"requests": requests} if requests is not None else {}
    fields |= {"image_tokens": image_tokens} if image_tokens is not None else {}
    # A JSON string is a TOML string too.
    lines = [f"{field} = {json.dumps(value, ensure_ascii=False)}" for field, value in fields.items()]
    entry = "\n".join(["[[keys]]", *lines, ""])
    try:
        path = file or load_settings().auth.keys_file
        if path is None:
            # The file that this goes to may declare the tier.
            declared = "" if tier in TIERS else f"[tiers.{json.dumps(tier, ensure_ascii=False)}]\n"
            parse_keys(entry + declared, Path("(not written)"))
        else:
            _append(path, entry)
    except SettingsError as error:
        sys.exit(f"askimage: {error}")
    print(key)
    if path is None:
        print(f"\n{entry}", end="")
    print("askimage: keep the key; it is not stored and not shown again", file=sys.stderr)


@keys.command("list")
def list_keys(file: _File = None) -> None:
    """Show names, tiers and limits; `-` is the service's own limit."""
    try:
        path = file or load_settings().auth.keys_file
        if path is None:
            raise SettingsError("no file of keys; name it with --file or ASKIMAGE_AUTH__KEYS_FILE")
        rows = [("NAME", "TIER", "REQUESTS", "IMAGE TOKENS"), *map(_row, read_keys(path).keys)]
    except SettingsError as error:
        sys.exit(f"askimage: {error}")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _row(key: Key) -> tuple[str, str, str, str]:
    return key.name, key.tier_name, key.tier.requests or "-", key.tier.image_tokens or "-"


def _append(path: Path, entry: str) -> None:
    """Add an entry at the file's end; the file is replaced whole, and only by one that can be read.

    Raises:
        SettingsError: The file, with the new entry, would be wrong; or it cannot be read or written.
    """
    target = path.resolve()  # a link stays a link
    try:
        with _one_at_a_time(target.parent):
            text = target.read_bytes().decode() if target.exists() else ""
            gap = "" if not text else "\n" if text.endswith("\n") else "\n\n"
            parse_keys(text + gap + entry, path)
            _replace(target, (text + gap + entry).encode())
    except OSError as error:
        raise SettingsError(f"cannot write the keys file {path}: {error.strerror}") from None
    except UnicodeError:
        raise SettingsError(f"keys file {path} is not UTF-8 text; save it as UTF-8") from None


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Keep two commands from each replacing the file without the other's key, which was printed and would not work.

    The lock is on the folder, since the file is another one after each change.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems lock no folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(target: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as written:
        try:
            if target.exists():
                before = target.stat()
                with contextlib.suppress(PermissionError):
                    os.chown(written.fileno(), before.st_uid, before.st_gid)
                os.chmod(written.fileno(), stat.S_IMODE(before.st_mode))
            written.write(content)
            written.flush()
            os.fsync(written.fileno())
            os.replace(written.name, target)
        except BaseException:
            os.unlink(written.name)
            raise
