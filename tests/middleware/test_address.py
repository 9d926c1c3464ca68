"""Which address counts as the client's."""

import ipaddress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.middleware.address import client_address

PEER = "192.0.2.7"


def address(*forwarded: str, proxies: int = 1, peer: str | None = PEER) -> str:
    headers = [(b"x-forwarded-for", value.encode("latin-1")) for value in forwarded]
    scope: dict[str, Any] = {"type": "http", "headers": headers, "client": peer and (peer, 1234)}
    return client_address(scope, proxies)


def test_without_proxies_the_header_is_not_believed() -> None:
    assert address("203.0.113.9", proxies=0) == PEER


def test_with_proxies_the_entry_that_far_from_the_right_counts() -> None:
    chain = "198.51.100.1, 203.0.113.9, 10.0.0.2"
    assert address(chain, proxies=1) == "10.0.0.2"
    assert address(chain, proxies=2) == "203.0.113.9"


def test_several_headers_are_one_list_in_order() -> None:
    assert address("198.51.100.1", "203.0.113.9, 10.0.0.2", proxies=3) == "198.51.100.1"
    assert address("198.51.100.1", "203.0.113.9", proxies=1) == "203.0.113.9"


def test_what_a_client_writes_itself_never_counts() -> None:
    assert address("1.1.1.1, 2.2.2.2", "203.0.113.9", proxies=1) == "203.0.113.9"


@pytest.mark.parametrize("forwarded", [[], ["203.0.113.9"], [""], ["203.0.113.9, "]])
def test_too_few_entries_fall_back_to_the_peer(forwarded: list[str]) -> None:
    assert address(*forwarded, proxies=3) == PEER


@pytest.mark.parametrize(
    "entry", ["", "unknown", "_hidden", "203.0.113.9:x", "203.0.113", "[203.0.113.9]:80", "[2001:db8::1", "1.2.3.4é"]
)
def test_an_entry_that_is_no_address_falls_back_to_the_peer(entry: str) -> None:
    assert address(entry) == PEER


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("203.0.113.9", "203.0.113.9"),
        ("203.0.113.9:8443", "203.0.113.9"),
        ("::ffff:203.0.113.9", "203.0.113.9"),
        ("[::ffff:203.0.113.9]:8443", "203.0.113.9"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("[2001:db8:1:2:3::4]", "2001:db8:1:2::/64"),
        ("[2001:DB8:1:2:ffff::]:443", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_every_way_to_write_an_address_becomes_one(entry: str, expected: str) -> None:
    assert address(entry) == expected
    assert address(peer=entry, proxies=0) == expected


def test_a_unix_socket_has_no_peer() -> None:
    assert address(proxies=0, peer=None) == "unknown"


@given(st.integers(0, 2**128 - 1), st.integers(0, 2**64 - 1))
def test_a_client_cannot_leave_its_network_of_64_bits(number: int, host: int) -> None:
    mine = ipaddress.IPv6Address(number)
    neighbour = ipaddress.IPv6Address(number >> 64 << 64 | host)
    if mine.ipv4_mapped is None and neighbour.ipv4_mapped is None:
        assert address(str(mine)) == address(f"[{neighbour}]:1")
        assert mine in ipaddress.IPv6Network(address(str(mine)))


@given(st.lists(st.text(st.characters(max_codepoint=255, exclude_characters=",")), max_size=4), st.ip_addresses(v=4))
def test_no_header_keeps_the_last_proxys_entry_from_counting(written: list[str], seen: ipaddress.IPv4Address) -> None:
    assert address(", ".join([*written, str(seen)])) == str(seen)


@given(st.text(st.characters(max_codepoint=255)), st.integers(0, 16))
def test_any_header_gives_an_address(forwarded: str, proxies: int) -> None:
    ipaddress.ip_network(address(forwarded, proxies=proxies))
