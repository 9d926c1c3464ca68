"""The file of keys: TOML with `[[keys]]` and `[tiers.NAME]`.

It holds SHA-256 hashes, never keys, so that a copy of it opens nothing. A key is 256 random bits, which makes a slow
password hash needless. An error is one line that names the file, the entry and what to change.
"""

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import limits
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from app.engine.request import PRIORITIES, PriorityClass
from app.identity import TIERS, Tier
from app.settings import SettingsError

RESERVED = {"anonymous": "requests without a key", "default": "the key in ASKIMAGE_AUTH__KEY"}


def digest(key: str) -> bytes:
    """SHA-256 of a key's UTF-8 text; bytes of a header that are not UTF-8 stay as they came."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _free_name(name: str) -> str:
    if name in RESERVED:
        raise ValueError(f"{name!r} stands for {RESERVED[name]}; choose another name")
    return name


def _hash(text: str) -> str:
    # A key pasted here by mistake must not reach a log, so the message does not repeat the value.
    if len(text) != 64 or not set(text.lower()) <= set("0123456789abcdef"):
        raise ValueError("must be the 64 hex digits of the key's SHA-256, not the key; `askimage keys new` makes both")
    return text.lower()


def _limits(text: str) -> str:
    try:
        limits.parse_many(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a limit; write it like `120/minute;2000/hour`, or leave it out") from None
    return text


_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
_Limits = Annotated[str, AfterValidator(_limits)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    requests: _Limits | None = None
    image_tokens: _Limits | None = None


class _KeyEntry(_Entry):
    name: Annotated[_Name, AfterValidator(_free_name)]
    sha256: Annotated[str, AfterValidator(_hash)]
    tier: str = "standard"


class _TierEntry(_Entry):
    default_class: PriorityClass = "normal"
    max_class: PriorityClass = "normal"


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: list[_KeyEntry] = Field(default_factory=list)
    tiers: dict[_Name, _TierEntry] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a file.

    Attributes:
        name: For logs, metrics and limits.
        sha256: The key's SHA-256.
        tier_name: The tier it names.
        tier: That tier with the key's own limits.
    """

    name: str
    sha256: bytes
    tier_name: str
    tier: Tier


@dataclass(frozen=True, slots=True)
class KeyFile:
    """What a keys file says: its keys, and every tier by name."""

    keys: tuple[Key, ...]
    tiers: Mapping[str, Tier]


def read_keys(path: Path) -> KeyFile:
    """Read a keys file.

    Raises:
        SettingsError: It cannot be read, or is wrong.
    """
    try:
        return parse_keys(path.read_bytes().decode("utf-8-sig"), path)
    except OSError as error:
        hint = f"; `askimage keys new NAME --file {path}` makes it" if isinstance(error, FileNotFoundError) else ""
        raise SettingsError(f"cannot read the keys file {path}: {error.strerror}{hint}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"keys file {path} is not UTF-8 text; save it as UTF-8") from None


def parse_keys(text: str, path: Path) -> KeyFile:
    """Parse the text of a keys file.

    Args:
        text: TOML, of `[[keys]]` and `[tiers.NAME]`.
        path: Where it is from, for messages.

    Raises:
        SettingsError: It is wrong; the message names the file, the entry and what to change.
    """
    raw: dict[str, Any] = {}
    try:
        raw = tomllib.loads(text)
        file = _File.model_validate(raw)
        tiers = TIERS | {name: _tier(name, entry) for name, entry in file.tiers.items()}
        return KeyFile(_keys(file, tiers), tiers)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SettingsError(f"keys file {path} is not valid TOML: {error}") from None
    except ValidationError as error:
        raise SettingsError(f"keys file {path}: {_first_error(error, raw)}") from None
    except ValueError as error:
        raise SettingsError(f"keys file {path}: {error}") from None


def _tier(name: str, entry: _TierEntry) -> Tier:
    tier = replace(TIERS.get(name, Tier()), **entry.model_dump(exclude_unset=True))
    if PRIORITIES[tier.default_class] < PRIORITIES[tier.max_class]:
        raise ValueError(
            f"[tiers.{name}]: default_class {tier.default_class!r} is above max_class {tier.max_class!r}; "
            "lower the one or raise the other"
        )
    return tier


def _keys(file: _File, tiers: Mapping[str, Tier]) -> tuple[Key, ...]:
    names: set[str] = set()
    owners: dict[str, str] = {}
    keys = []
    for entry in file.keys:
        if entry.name in names:
            raise ValueError(f"two [[keys]] have the name {entry.name!r}; rename or remove one")
        if entry.sha256 in owners:
            raise ValueError(f"sha256: {owners[entry.sha256]!r} and {entry.name!r} are the same key; remove one")
        if entry.tier not in tiers:
            raise ValueError(f"key {entry.name!r}, tier: {_unknown_tier(entry.tier, tiers)}")
        names.add(entry.name)
        owners[entry.sha256] = entry.name
        own = entry.model_dump(include={"requests", "image_tokens"}, exclude_none=True)
        tier = replace(tiers[entry.tier], **own)
        keys.append(Key(entry.name, bytes.fromhex(entry.sha256), entry.tier, tier))
    return tuple(keys)


def _unknown_tier(name: str, tiers: Mapping[str, Tier]) -> str:
    return f"there is no tier {name!r}; take one of {', '.join(tiers)}, or declare it as [tiers.NAME] in the keys file"


def _first_error(error: ValidationError, raw: dict[str, Any]) -> str:
    first = error.errors(include_input=False, include_url=False)[0]
    match first["loc"]:
        case ("keys", int(index), *rest):
            name = raw["keys"][index].get("name") if isinstance(raw["keys"][index], dict) else None
            where = f"key {name!r}" if isinstance(name, str) and rest != ["name"] else f"[[keys]] number {index + 1}"
        case ("tiers", name, *rest):
            where = f"[tiers.{name}]" if str(name).isprintable() else f"tier {name!r}"
        case (*rest,):
            where = ""
    place = ", ".join(part for part in (where, ".".join(str(part) for part in rest)) if part)
    message = first["msg"].removeprefix("Value error, ")
    return f"{place}: {'is not known here; remove or rename it' if first['type'] == 'extra_forbidden' else message}"
