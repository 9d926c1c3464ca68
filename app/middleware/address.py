"""The address that a request comes from, as far as it can be trusted.

Anyone can write `X-Forwarded-For`; a proxy appends what it saw. So only as many entries from the right count as there
are proxies of ours, and anything odd falls back to the socket's own peer.
"""

import ipaddress
import re

from starlette.datastructures import Headers
from starlette.types import Scope

_WITH_PORT = re.compile(r"\[([0-9A-Za-z.:%]*:[0-9A-Za-z.:%]*)\](?::[0-9]{1,5})?|([0-9.]+):[0-9]{1,5}")
_UNKNOWN = "unknown"
_CLIENT_BITS = 64


def client_address(scope: Scope, trusted_proxies: int) -> str:
    """The client's IPv4 address, or its IPv6 network of 64 bits, because one client has all of that.

    Args:
        scope: Of an HTTP request.
        trusted_proxies: Proxies in front. With N, the address is the N-th from the right over all `X-Forwarded-For`
            headers; with 0, or where that is no address, it is the socket's peer.
    """
    if trusted_proxies:
        entries = ",".join(Headers(scope=scope).getlist("x-forwarded-for")).split(",")
        if len(entries) >= trusted_proxies and (forwarded := _normal(entries[-trusted_proxies].strip())):
            return forwarded
    # A server on a Unix socket knows no peer.
    peer: str = (scope.get("client") or (_UNKNOWN, 0))[0]
    return _normal(peer) or peer


def _normal(text: str) -> str | None:
    """One way to write each address; None where it is none."""
    match = _WITH_PORT.fullmatch(text)
    try:
        address = ipaddress.ip_address(text if match is None else match[1] or match[2])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    # As a number, which leaves out a zone (`fe80::1%eth0`): a client could make up as many as it likes.
    return str(ipaddress.IPv6Network((int(address), _CLIENT_BITS), strict=False))
