"""The address under which other nodes reach this one, also where its name stands for a loopback address.

Debian's installer, and many images, write ``127.0.1.1 NAME`` into a machine's own /etc/hosts. No other host reaches
what listens under that name; and gloo, which looks up its own host's name, tells that address to its peers.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable

from resilio_hpc.core.errors import LaunchError

_SIOCGIFADDR = 0x8915  # netdevice(7)
_ANY_PORT = 9  # no packet is sent
MOST_ASKED = 4  # of the other nodes: each look-up may take a resolver's time limit


def reachable(name: str, others: Iterable[str]) -> str:
    """Return ``name`` where it stands for an address that others reach, else an address of this host.

    It is the address on the route to the first of ``others`` (names or addresses) that is no loopback address. Raises
    LaunchError where there is none.
    """
    own = _addresses(name)
    if not own or not all(map(_is_loopback, own)):
        return name
    for other in list(others)[:MOST_ASKED]:
        for address in _addresses(other):
            source = _source_towards(address)
            if source and not _is_loopback(source):
                return source
    raise LaunchError(
        f"{name} stands for {own[0]} on itself, where no other node reaches it, and no way to another node is known: "
        f"give {name} its address in its /etc/hosts or in DNS"
    )


def interface_of(address: str) -> str:
    """Return the network interface that has an IPv4 address, "" where none is known."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
        if socket.inet_ntoa(found[20:24]) == address:
            return name
    return ""


def _addresses(name: str) -> list[str]:
    try:
        return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)))
    except (OSError, UnicodeError):
        return []


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _source_towards(address: str) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _ANY_PORT))
        except OSError:
            return ""
        return str(probe.getsockname()[0])
