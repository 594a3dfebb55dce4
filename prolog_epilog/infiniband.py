"""Ports of InfiniBand and RoCE adapters, from /sys/class/infiniband."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from resilio_hpc.prolog_epilog.check import Absent, Fault, Limits, Unreadable
from resilio_hpc.prolog_epilog.node import Node
from resilio_hpc.prolog_epilog.node_files import NodeFiles

CLASS = "/sys/class/infiniband"
_STATE = re.compile(r"(\d+): ?([A-Za-z_ ]+)")
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec")


@dataclass(frozen=True)
class Port:
    """``name``: as in mlx5_0/1. ``state`` is ACTIVE, DOWN, INIT, ARMED …; ``physical`` LinkUp, Polling, Disabled …"""

    name: str
    state: str
    physical: str
    rate_gbps: float
    ethernet: bool
    counters: Mapping[str, int] = field(default_factory=dict)


def fetch(node: Node) -> list[Port]:
    """Raises Absent without an adapter, Unreadable where a port does not tell its state."""
    files = node.files
    ports = []
    for device in files.names(CLASS):
        for number in files.names(f"{CLASS}/{device}/ports", r"\d+"):
            ports.append(_port(files, f"{device}/{number}", f"{CLASS}/{device}/ports/{number}"))
    if not ports and node.settings["infiniband"].number("ports") == 0:
        raise Absent("no InfiniBand or RoCE adapter")
    return ports


def _port(files: NodeFiles, name: str, folder: str) -> Port:
    counters = {}
    for group in ("counters", "hw_counters"):
        for counter in files.names(f"{folder}/{group}", r"[a-zA-Z0-9_]+"):
            if counter in _READ:
                value = files.optional_number(f"{folder}/{group}/{counter}")
                if value is not None:
                    counters[counter] = value
    return Port(
        name,
        parse_state(files.text(f"{folder}/state"), name),
        parse_state(files.text(f"{folder}/phys_state"), name),
        parse_rate(files.text(f"{folder}/rate"), name),
        (files.optional(f"{folder}/link_layer") or "").strip() == "Ethernet",
        counters,
    )


def parse_state(text: str, name: str) -> str:
    """``4: ACTIVE``. Raises Unreadable. Pure."""
    found = _STATE.fullmatch(text.strip())
    if not found:
        raise Unreadable(f"{name}: not the state of a port: {text[:40]!r}")
    return found[2]


def parse_rate(text: str, name: str) -> float:
    """``400 Gb/sec (4X NDR)``. Raises Unreadable. Pure."""
    found = _RATE.match(text.strip())
    if not found:
        raise Unreadable(f"{name}: not the rate of a port: {text[:40]!r}")
    return float(found[1])


def link_state(ports: list[Port], limits: Limits) -> Iterable[Fault]:
    """Ports that are not active. One that nobody ever plugged in is left out (``ignored``)."""
    used = _used(ports, limits)
    expected = int(limits.number("ports"))
    for port in used:
        if port.state != "ACTIVE":
            yield Fault(f"{port.name} is {port.state} ({port.physical})", port.name)
    if len(used) < expected:
        yield Fault(f"{len(used)} of {expected} ports")


def rate(ports: list[Port], limits: Limits) -> Iterable[Fault]:
    """Slower than the site says, or than the fastest of the same kind here: a cable or transceiver that fell back."""
    used = [port for port in _used(ports, limits) if port.state == "ACTIVE"]
    for port in used:
        best = limits.number("gbps") or max(one.rate_gbps for one in used if one.ethernet == port.ethernet)
        if port.rate_gbps < best:
            yield Fault(f"{port.name} runs at {port.rate_gbps:g} of {best:g} Gb/s", port.name)


def _used(ports: list[Port], limits: Limits) -> list[Port]:
    return [port for port in ports if port.name not in limits.texts("ignored")]


_FATAL = ("link_downed", "excessive_buffer_overrun_errors", "local_link_integrity_errors")
_SYMBOL = ("symbol_error",)
_ERRORS = ("port_rcv_errors", "port_rcv_remote_physical_errors", "port_xmit_discards", "link_error_recovery")
_ROCE = ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err", "req_cqe_error")
_READ = frozenset((*_FATAL, *_SYMBOL, *_ERRORS, *_ROCE))


def _counting(names: tuple[str, ...]) -> Callable[[list[Port]], Mapping[str, int]]:
    def counters(ports: list[Port]) -> Mapping[str, int]:
        found = {
            f"{port.name} {name}": port.counters[name] for port in ports for name in names if name in port.counters
        }
        if not found:
            raise Absent("no port counts these")
        return found

    return counters


fatal_counters = _counting(_FATAL)
symbol_errors = _counting(_SYMBOL)
port_errors = _counting(_ERRORS)
transport_errors = _counting(_ROCE)
