"""Ethernet interfaces with hardware behind them, from /sys/class/net."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from resilio_hpc.prolog_epilog.check import Absent, Fault, Limits
from resilio_hpc.prolog_epilog.node import Node
from resilio_hpc.prolog_epilog.node_files import NodeFiles

CLASS = "/sys/class/net"
_UP = 0x1  # IFF_UP
_ERRORS = ("rx_errors", "tx_errors", "rx_crc_errors")


@dataclass(frozen=True)
class Interface:
    """One that is set up. ``speed_mbps`` is None where the driver does not tell (virtual machines)."""

    name: str
    carrier: bool
    speed_mbps: int | None
    changes: int | None
    errors: Mapping[str, int]


def fetch(node: Node) -> list[Interface]:
    """Interfaces that are up and are hardware. Raises Absent without any, Unreadable."""
    files = node.files
    found = []
    for name in files.names(CLASS):
        folder = f"{CLASS}/{name}"
        if files.exists(f"{folder}/device") and files.number(f"{folder}/flags") & _UP:
            found.append(_interface(files, name, folder))
    if not found:
        raise Absent("no Ethernet interface with hardware is up")
    return found


def _interface(files: NodeFiles, name: str, folder: str) -> Interface:
    speed = files.optional_number(f"{folder}/speed")  # EINVAL without a link; -1 where it is unknown
    errors = {error: files.optional_number(f"{folder}/statistics/{error}") for error in _ERRORS}
    return Interface(
        name,
        files.optional_number(f"{folder}/carrier") == 1,
        speed if speed is not None and speed > 0 else None,
        files.optional_number(f"{folder}/carrier_changes"),
        {error: value for error, value in errors.items() if value is not None},
    )


def link(interfaces: list[Interface], limits: Limits) -> Iterable[Fault]:
    """Up, and yet without a carrier."""
    for one in interfaces:
        if not one.carrier and one.name not in limits.texts("ignored"):
            yield Fault(f"{one.name} has no carrier", one.name)


def speed(interfaces: list[Interface], limits: Limits) -> Iterable[Fault]:
    """Slower than the site says."""
    least = limits.number("mbps")
    if least == 0:
        raise Absent("the site names no speed (limits.mbps)")
    for one in interfaces:
        told = one.speed_mbps is not None and one.name not in limits.texts("ignored")
        if told and one.speed_mbps is not None and one.speed_mbps < least:
            yield Fault(f"{one.name} runs at {one.speed_mbps} of {least:.0f} Mb/s", one.name)


def flaps(interfaces: list[Interface]) -> Mapping[str, int]:
    return {f"{one.name} changes": one.changes for one in interfaces if one.changes is not None}


def errors(interfaces: list[Interface]) -> Mapping[str, int]:
    return {f"{one.name} {name}": value for one in interfaces for name, value in one.errors.items()}
