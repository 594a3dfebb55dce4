"""Xid events: those lines of the kernel's log by which NVIDIA's driver reports an error of a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from resilio_hpc.prolog_epilog.checks.kernel_log import Line

RECOVERY = 154
"""The Xid whose line names the action that the driver asks for."""
# of a MIG instance: (PCI:0000:65:00 GPU-I:05 GPU-CI:00); of old drivers: (0000:03:00)
_LINE = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{5,16})(?: [^)]*)?\): (\d{1,5})(?:,\s*(.*))?$")
# the place on the chip; GPCCLIENT_T1_0 alone names a kind of client, which each GPC has
_UNITS = (re.compile(r"GPC ?(\d+)[, ]+TPC ?(\d+)"), re.compile(r"\bGPC(\d+) GPCCLIENT_(\w+)"))
_PROCESS = re.compile(r"\bpid='?(\d+)'?(?:, name='?([^,']*))?")


@dataclass(frozen=True)
class XidEvent:
    """One Xid of one GPU (its PCI address), at seconds since boot; ``unit``: the part of the GPU, if told.

    ``users``: whose programs were on the node around that time; empty where that is not known.
    """

    at_s: float
    gpu: str
    xid: int
    unit: str
    text: str
    users: frozenset[int] = frozenset()

    @property
    def process(self) -> tuple[str, str] | None:
        """Return number and name of the process with that GPU work; None where the line has none (``<unknown>``)."""
        found = _PROCESS.search(self.text)
        return (found[1], found[2] or "") if found else None


def parse(lines: Iterable[Line]) -> list[XidEvent]:
    """Return the Xids of a kernel log, in order. Pure."""
    events = []
    for line in lines:
        found = _LINE.search(line.text)
        if found:
            text = found[3] or ""
            events.append(XidEvent(line.at_s, address(found[1]), int(found[2]), _unit(text), text))
    return events


def _unit(text: str) -> str:
    tpc, client = (one.search(text) for one in _UNITS)
    if tpc:
        return f"GPC {tpc[1]}, TPC {tpc[2]}"
    return f"GPC {client[1]}, {client[2]}" if client else ""


def address(text: str) -> str:
    """Return a PCI address as in the kernel's log, without function: 0000:3b:00. Pure."""
    words = text.lower().split(".")[0].split(":")
    words = words if len(words) == 3 else ["0", *words]
    return ":".join([f"{int(words[0] or '0', 16):04x}", *words[1:3]])


def collapsed(events: Sequence[XidEvent], burst_s: float) -> list[XidEvent]:
    """Return events without repetitions (GPU, number, unit) within ``burst_s``; of Xid 154 each is kept. Pure."""
    kept: list[XidEvent] = []
    last: dict[tuple[str, int, str], float] = {}
    for event in sorted(events, key=lambda event: event.at_s):
        key = (event.gpu, event.xid, event.unit)
        if event.xid == RECOVERY or key not in last or event.at_s - last[key] > burst_s:
            kept.append(event)
        last[key] = event.at_s
    return kept
