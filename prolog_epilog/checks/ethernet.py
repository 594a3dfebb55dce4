"""Ethernet interfaces with hardware behind them, from /sys/class/net."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from resilio_hpc.prolog_epilog.base.check import Absent, DeviceHistory, Doubt, Fault, Thresholds, Unreadable, Value
from resilio_hpc.prolog_epilog.base.node import NodeView
from resilio_hpc.prolog_epilog.base.node_files import NodeFiles

CLASS = "/sys/class/net"
_UP = 0x1  # IFF_UP
_ERRORS = ("rx_errors", "tx_errors", "rx_crc_errors")


@dataclass(frozen=True)
class Interface:
    """An interface that is up. ``speed_mbps``: None where the driver does not tell it (virtual machines).

    ``trouble``: why it could not be read, or "".
    """

    name: str
    carrier: bool
    speed_mbps: int | None = None
    changes: int | None = None
    errors: Mapping[str, int | Unreadable] = field(default_factory=dict)
    trouble: str = ""


def fetch(node: NodeView) -> list[Interface]:
    """Return hardware interfaces that are up. Raises Absent without any."""
    files = node.files
    found = []
    for name in files.names(CLASS):
        folder = f"{CLASS}/{name}"
        if not files.exists(f"{folder}/device"):
            continue
        try:
            if files.number(f"{folder}/flags") & _UP:
                found.append(_interface(files, name, folder))
        except Unreadable as error:
            found.append(Interface(name, False, trouble=str(error)))
    if not found:
        raise Absent("no Ethernet interface with hardware is up")
    return found


def _interface(files: NodeFiles, name: str, folder: str) -> Interface:
    speed = files.optional_number(f"{folder}/speed")  # EINVAL without a link; -1 where it is unknown
    errors: dict[str, int | Unreadable] = {}
    for name_of_counter in _ERRORS:
        try:
            value = files.optional_number(f"{folder}/statistics/{name_of_counter}")
        except Unreadable as error:
            errors[name_of_counter] = error
            continue
        if value is not None:
            errors[name_of_counter] = value
    return Interface(
        name,
        files.optional_number(f"{folder}/carrier") == 1,
        speed if speed is not None and speed > 0 else None,
        files.optional_number(f"{folder}/carrier_changes"),
        errors,
    )


def link(interfaces: list[Interface], limits: Thresholds, past: DeviceHistory) -> Iterable[Fault]:
    """Yield interfaces that are up without a carrier, unless the baseline says that this is normal."""
    for one in interfaces:
        if one.trouble:
            yield Doubt(one.trouble, one.name)
        elif not one.carrier and one.name not in limits.texts("ignored") and past.normal.get(one.name) is not False:
            yield Fault(f"{one.name} has no carrier", one.name)
    for name in sorted(past.normal.keys() - {one.name for one in interfaces} - {*limits.texts("ignored")}):
        if past.normal[name]:
            yield Fault(f"{name} is not there any more, or not up", name)


def carriers(interfaces: list[Interface]) -> Mapping[str, Value]:
    """Return which interfaces have a carrier."""
    return {one.name: one.carrier for one in interfaces if not one.trouble}


def speed(interfaces: list[Interface], limits: Thresholds, past: DeviceHistory) -> Iterable[Fault]:
    """Yield interfaces slower than the site's limit, or than they were before."""
    yield from (Doubt(one.trouble, one.name) for one in interfaces if one.trouble)
    for one in interfaces:
        least = limits.number("mbps") or past.of(one.name) or 0
        told = one.speed_mbps is not None and one.name not in limits.texts("ignored")
        if told and one.speed_mbps is not None and one.speed_mbps < least:
            yield Fault(f"{one.name} runs at {one.speed_mbps} of {least:.0f} Mb/s", one.name)


def speeds(interfaces: list[Interface]) -> Mapping[str, Value]:
    """Return the speeds of interfaces that tell them."""
    return {one.name: one.speed_mbps for one in interfaces if one.speed_mbps is not None}


def flaps(interfaces: list[Interface]) -> Mapping[str, int | Unreadable]:
    changes = {f"{one.name} changes": one.changes for one in interfaces if one.changes is not None}
    return {**changes, **_troubles(interfaces)}


def errors(interfaces: list[Interface]) -> Mapping[str, int | Unreadable]:
    found = {f"{one.name} {name}": value for one in interfaces for name, value in one.errors.items()}
    return {**found, **_troubles(interfaces)}


def _troubles(interfaces: list[Interface]) -> Mapping[str, Unreadable]:
    return {f"{one.name} trouble": Unreadable(one.trouble) for one in interfaces if one.trouble}
