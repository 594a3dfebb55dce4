"""Ports of InfiniBand and RoCE adapters, from /sys/class/infiniband."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from resilio_hpc.prolog_epilog.base.check import Absent, DeviceHistory, Doubt, Fault, Thresholds, Unreadable, Value
from resilio_hpc.prolog_epilog.base.node import NodeView
from resilio_hpc.prolog_epilog.base.node_files import NodeFiles, no_value, whole_number

CLASS = "/sys/class/infiniband"
_STATE = re.compile(r"(\d+): ?([A-Za-z_ ]+)")
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec")


@dataclass(frozen=True)
class Port:
    """A port. ``name``: as in mlx5_0/1.

    ``state``: ACTIVE, DOWN, INIT, ARMED …; ``physical``: LinkUp, Polling, Disabled …

    ``kind``: makes two ports comparable: driver, link layer, model of the adapter. ``trouble``: why state or rate could
    not be read, or "".
    """

    name: str
    state: str
    physical: str
    rate_gbps: float
    kind: tuple[str, ...] = ()
    counters: Mapping[str, int | Unreadable] = field(default_factory=dict)
    trouble: str = ""


def fetch(node: NodeView) -> list[Port]:
    """Return the ports, without virtual functions, which come and go with jobs. Raises Absent without an adapter."""
    files = node.files
    ports = []
    for device in files.names(CLASS):
        if files.exists(f"{CLASS}/{device}/device/physfn"):
            continue
        try:
            numbers = files.names(f"{CLASS}/{device}/ports", r"\d+")
        except Unreadable as error:
            ports.append(Port(device, "", "", 0.0, trouble=str(error)))
            continue
        ports += [_port(files, device, number) for number in numbers]
    if not ports and node.settings["infiniband"].number("ports") == 0:
        raise Absent("no InfiniBand or RoCE adapter")
    return ports


def _port(files: NodeFiles, device: str, number: str) -> Port:
    name, folder = f"{device}/{number}", f"{CLASS}/{device}/ports/{number}"
    counters = _counters(files, f"{folder}/counters") | _counters(files, f"{folder}/hw_counters")
    try:
        return Port(
            name,
            parse_state(files.text(f"{folder}/state"), name),
            parse_state(files.text(f"{folder}/phys_state"), name),
            parse_rate(files.text(f"{folder}/rate"), name),
            _kind(files, device, folder),
            counters,
        )
    except Unreadable as error:
        return Port(name, "", "", 0.0, (), counters, str(error))


def _kind(files: NodeFiles, device: str, folder: str) -> tuple[str, ...]:
    """Return a port's kind.

    Names of one driver begin with the same letters, by the kernel and by udev (ibp1s0, rocep1s0).
    """
    model = [f"{CLASS}/{device}/{name}" for name in ("node_type", "hca_type", "board_id")]
    return (re.split(r"[\d_]", device)[0], *(_word(files, path) for path in (f"{folder}/link_layer", *model)))


def _word(files: NodeFiles, path: str) -> str:
    """Return a word of a file; "" where it is missing or unreadable."""
    try:
        return (files.optional(path) or "").strip()
    except Unreadable:
        return ""


def _counters(files: NodeFiles, folder: str) -> dict[str, int | Unreadable]:
    """Return the counters of a folder, and why one, or all, cannot be read."""
    try:
        names = [name for name in files.names(folder, r"[a-zA-Z0-9_]+") if name in _READ]
    except Unreadable as error:
        return dict.fromkeys(_READ, error)
    found = {name: _counter(files, f"{folder}/{name}") for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _counter(files: NodeFiles, path: str) -> int | Unreadable | None:
    """Return a counter; None where the adapter lacks it: "N/A (no PMA)", as on iWARP and virtual adapters."""
    try:
        text = (files.optional(path) or "").strip()
        return None if not text or text.startswith("N/A") else whole_number(text, path)
    except Unreadable as error:
        return None if no_value(error) else error


def parse_state(text: str, name: str) -> str:
    """Parse ``4: ACTIVE``. Raises Unreadable. Pure."""
    found = _STATE.fullmatch(text.strip())
    if not found:
        raise Unreadable(f"{name}: not the state of a port: {text[:40]!r}")
    return found[2]


def parse_rate(text: str, name: str) -> float:
    """Parse ``400 Gb/sec (4X NDR)``. Raises Unreadable. Pure."""
    found = _RATE.match(text.strip())
    if not found:
        raise Unreadable(f"{name}: not the rate of a port: {text[:40]!r}")
    return float(found[1])


def link_state(ports: list[Port], limits: Thresholds, past: DeviceHistory) -> Iterable[Fault]:
    """Yield ports that are not active.

    One that never was active may be meant so (nothing plugged in, switched off): a warning, until a baseline or
    ``ignored`` says so.
    """
    used = list(_used(ports, limits))
    yield from _doubts(used)
    for port in used:
        active = port.state == "ACTIVE"
        if port.trouble or active or past.normal.get(port.name) is False:
            continue
        action = past.action(port.name, active)
        never = "" if action is None else ", and was not ACTIVE since it was first looked at"
        yield Fault(f"{port.name} is {port.state} ({port.physical}){never}", port.name, on_fail=action)
    there = {port.name for port in used}
    for name in sorted({*past.normal, *past.seen} - there - {*limits.texts("ignored")}):
        if past.of(name):
            yield Fault(f"{name} is not there any more", name)
    expected = int(limits.number("ports"))
    if len(used) < expected:
        yield Fault(f"{len(used)} of {expected} ports")


def active_ports(ports: list[Port]) -> Mapping[str, Value]:
    """Return which ports are active."""
    return {port.name: port.state == "ACTIVE" for port in ports if not port.trouble}


def rate(ports: list[Port], limits: Thresholds, past: DeviceHistory) -> Iterable[Fault]:
    """Yield ports slower than the site's limit, or than before: a cable or transceiver that fell back.

    A new port is compared with the fastest of its kind here, and only warned of: a node may have ports at several
    rates.
    """
    used = [port for port in _used(ports, limits) if port.state == "ACTIVE"]
    yield from _doubts(_used(ports, limits))
    wanted = limits.number("gbps")
    for port in used:
        alike = max(one.rate_gbps for one in used if one.kind == port.kind)
        best = wanted or past.expected(port.name, alike)
        if port.rate_gbps < best:
            action = None if wanted else past.action(port.name, port.rate_gbps)
            yield Fault(f"{port.name} runs at {port.rate_gbps:g} of {best:g} Gb/s", port.name, on_fail=action)


def rates(ports: list[Port]) -> Mapping[str, Value]:
    """Return the rates of active ports."""
    return {port.name: port.rate_gbps for port in ports if port.state == "ACTIVE"}


def _used(ports: list[Port], limits: Thresholds) -> Iterator[Port]:
    return (port for port in ports if port.name not in limits.texts("ignored"))


def _doubts(ports: Iterable[Port]) -> Iterator[Doubt]:
    return (Doubt(port.trouble, port.name) for port in ports if port.trouble)


_FATAL = ("link_downed", "excessive_buffer_overrun_errors", "local_link_integrity_errors")
_SYMBOL = ("symbol_error",)
_ERRORS = ("port_rcv_errors", "port_rcv_remote_physical_errors", "port_xmit_discards", "link_error_recovery")
_ROCE = ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err", "req_cqe_error")
_READ = frozenset((*_FATAL, *_SYMBOL, *_ERRORS, *_ROCE))


def _counting(names: tuple[str, ...]) -> Callable[[list[Port]], Mapping[str, int | Unreadable]]:
    def counters(ports: list[Port]) -> Mapping[str, int | Unreadable]:
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
