"""
Where a webhook may go: names are resolved once, every address is judged, and the call goes to a judged one.

The hole: an address is judged by its number alone. One that is public by number and private by a route
of your network, as the address 168.63.129.16 of Azure is, is called.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from durable_core.ready.bounded import Bounded

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# Translators of IPv6 to IPv4 deliver these to the IPv4 address in their last 32 bits.
_TRANSLATED = (IPv6Network("64:ff9b::/96"), IPv6Network("::/96"))

# Not the open internet's by IANA's registries of special purpose, though one Python release or another takes them for
# it: the answer must not change with the machine. In their order: protocol assignments, NAT64 of one's own network,
# 6to4, documentation, segment routing.
_NOT_PUBLIC = tuple(
    ip_network(one) for one in ("192.0.0.0/24", "64:ff9b:1::/48", "2002::/16", "3fff::/20", "5f00::/16")
)

_lookups = Bounded("durable-name-lookup")


class PrivateTarget(Exception):
    """A host has an address that is not public; `address` is the first such."""

    def __init__(self, host: str, address: str) -> None:
        super().__init__(host, address)
        self.host, self.address = host, address

    def __str__(self) -> str:
        return (
            f"{self.host} is {self.address}, which is not a public address; "
            "private_targets=True or allow=(network,) of Webhooks permits it"
        )


def networks(allowed: Iterable[str]) -> tuple[Network, ...]:
    """`10.1.0.0/16` or `10.1.2.3`. Raises ValueError."""
    return tuple(ip_network(one) for one in allowed)


def is_public(address: Address) -> bool:
    """Whether an address is one of the open internet's; multicast and the site-local addresses of old are not."""
    site_local = isinstance(address, IPv6Address) and address.is_site_local
    special = any(address in network for network in _NOT_PUBLIC)
    return address.is_global and not (address.is_multicast or site_local or special)


def _faces(address: Address) -> Iterator[Address]:
    """The addresses that a packet to this one may end at: a mapped, translated or tunnelled IPv4 address too."""
    if isinstance(address, IPv4Address):
        yield address
        return
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
        return
    yield address
    if address.sixtofour is not None:
        yield address.sixtofour
    if any(address in network for network in _TRANSLATED):
        yield IPv4Address(address.packed[-4:])


def permitted(address: Address, allowed: Iterable[Network] = ()) -> bool:
    """Whether it may be called: every face of it is public, or in a network that is allowed."""
    return all(is_public(face) or any(face in network for network in allowed) for face in _faces(address))


def judged(host: str, port: int, *, seconds: float, anywhere: bool, allowed: Iterable[Network] = ()) -> list[str]:
    """
    The addresses of a host, each judged, in the order of the system's resolver.

    One private address refuses the host: a name that has a public one beside it tries something.
    Raises PrivateTarget; TimeoutError when the resolver is slower than `seconds`; OSError, with
    its subclass gaierror, when the name has no address.
    """
    if not anywhere:
        # Said before it is asked: some resolvers know no `localhost.`, and those names mean this machine everywhere.
        check_literal(host, allowed=allowed)
    # The resolver reads 0x7f000001 and 2130706433 as the connection would; no parser of ours is asked.
    found = _lookups.within(seconds, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if not anywhere:
        _check(host, addresses, allowed)
    return addresses


def check_literal(host: str, *, allowed: Iterable[Network] = ()) -> None:
    """Judge a host that needs no resolver: an address in any spelling, and localhost. Raises PrivateTarget."""
    name = host.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        _check(host, ["127.0.0.1"], allowed)
        return
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return  # a name
    _check(host, [str(entry[4][0]) for entry in found], allowed)


def _check(host: str, addresses: Iterable[str], allowed: Iterable[Network]) -> None:
    for address in addresses:
        if not permitted(ip_address(address), allowed):
            raise PrivateTarget(host, address)
