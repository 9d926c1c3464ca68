"""Whose key a request presents, from the settings' one key and a file that is read again when it changes.

A table of keys is immutable and replaced whole, so that a request sees the old one or the new one. A file that is
broken or gone never changes who may ask: the keys read before stay.
"""

import asyncio
import hmac
import ipaddress
import logging
from dataclasses import dataclass

from app.errors import Unauthorized
from app.identity import TIERS, Client, Tier
from app.keyfile import KeyFile, digest, read_keys
from app.settings import AuthSettings, Settings, SettingsError

logger = logging.getLogger(__name__)

HOW_TO_SEND = "send it in the header `Authorization: Bearer KEY`"


@dataclass(frozen=True, slots=True)
class _Table:
    """Who may ask.

    Attributes:
        clients: SHA-256 of every key, and whose it is.
        anonymous: Tier of requests without a key; None refuses them.
        guarded: There are keys, or were: then a file without any must not open the service to everyone.
    """

    clients: tuple[tuple[bytes, Client], ...]
    anonymous: Tier | None
    guarded: bool


class KeyStore:
    """The keys of the settings and of their file.

    Args:
        settings: Where the keys are, and whether requests without one are taken.

    Raises:
        SettingsError: The file cannot be read or is wrong, or a setting is.
    """

    def __init__(self, settings: AuthSettings) -> None:
        self._settings = settings
        self._seen = self._signature()
        self._table = self._load(guarded=False)

    @property
    def has_keys(self) -> bool:
        """Is there any key?"""
        return bool(self._table.clients)

    def client(self, token: str | None, address: str) -> Client:
        """The client that a request comes from.

        The token's hash is compared with every stored one in constant time, so that the time taken tells nothing.

        Args:
            token: The key as presented; None when there is none.
            address: What requests without a key are counted by.

        Raises:
            Unauthorized: The key is not known (even where none is needed), or is missing where one is needed.
        """
        table = self._table
        if token is None:
            if table.anonymous is None:
                raise Unauthorized(f"this service wants a key; {HOW_TO_SEND}")
            return Client("anonymous", f"address:{address}", table.anonymous)
        presented, found = digest(token), None
        for known, client in table.clients:
            if hmac.compare_digest(presented, known):
                found = client
        if found is None:
            raise Unauthorized(f"the key is not one of this service's; {HOW_TO_SEND}, whole and without quotes")
        return found

    async def watch(self, seconds: float = 2.0) -> None:
        """Look at the file every so many seconds and read it again when it changed; returns at once without a file."""
        while self._settings.keys_file is not None:
            await asyncio.sleep(seconds)
            await asyncio.to_thread(self._reload_if_changed)

    def _reload_if_changed(self) -> None:
        # Looked at before it is read: a change in between is then a change at the next look.
        signature = self._signature()
        if signature == self._seen:
            return
        self._seen = signature
        try:
            self._table = self._load(self._table.guarded)
        except SettingsError as error:
            logger.error("keys not reloaded, those read before stay: %s", error)
        else:
            logger.info("keys reloaded: %d keys", len(self._table.clients))

    def _signature(self) -> tuple[int, ...] | None:
        try:
            status = self._settings.keys_file.stat() if self._settings.keys_file else None
        except OSError:
            return None
        # The change time is there for a file that only became readable.
        return status and (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)

    def _load(self, guarded: bool) -> _Table:
        path = self._settings.keys_file
        file = read_keys(path) if path else KeyFile((), TIERS)
        clients = [(key.sha256, Client(key.name, f"key:{key.name}", key.tier)) for key in file.keys]
        if (key := self._own_key()) is not None:
            if any(known == key for known, _ in clients):
                raise SettingsError(f"keys file {path} has the key of ASKIMAGE_AUTH__KEY too; remove one of them")
            clients.append((key, Client("default", "key:default", file.tiers["premium"])))
        guarded = guarded or bool(clients)
        name = self._settings.anonymous_tier or ("standard" if guarded else "premium")
        if name not in file.tiers:
            raise SettingsError(f"ASKIMAGE_AUTH__ANONYMOUS_TIER: no tier {name!r}; take one of {', '.join(file.tiers)}")
        open_to_all = self._settings.anonymous or not guarded
        return _Table(tuple(clients), file.tiers[name] if open_to_all else None, guarded)

    def _own_key(self) -> bytes | None:
        if self._settings.key is None:
            return None
        key = self._settings.key.get_secret_value()
        if key.split() != [key]:
            raise SettingsError("ASKIMAGE_AUTH__KEY is empty or has a space in it, which no request can send")
        return digest(key)


def check_exposure(settings: Settings, keys: KeyStore) -> None:
    """Keep a service without keys from listening on other than this machine's own addresses.

    Raises:
        SettingsError: It would; the message names the ways out.
    """
    host = settings.server.host
    if keys.has_keys or settings.auth.anonymous or _is_loopback(host):
        return
    raise SettingsError(
        f"ASKIMAGE_SERVER__HOST={host} lets other machines ask, and there are no keys; set ASKIMAGE_AUTH__KEYS_FILE "
        "(`askimage keys new` makes keys) or ASKIMAGE_AUTH__KEY, or ASKIMAGE_AUTH__ANONYMOUS=true to let everyone ask"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
