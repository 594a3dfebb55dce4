"""Xids: what NVIDIA's driver writes to the kernel's log when something is wrong with a GPU, and what that asks for.

``xid.csv`` says what each one means. Three rules go beyond one line: the same Xid of a GPU within minutes is one event;
Xids that a program may cause (13, 31) are hardware when they repeat on the same unit of the GPU; and a GPU with several
events of faulty hardware within a day is not one that a reset puts right.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from resilio_hpc.core.errors import UsageError
from resilio_hpc.prolog_epilog.check import ON_FAIL, Fault, Former, Limits, OnFail
from resilio_hpc.prolog_epilog.kernel_log import KernelLog, Line

POLICY = Path(__file__).parent / "checks" / "xid.csv"
CLASSES = ("ignore", "software", "application", "reset", "reboot", "workflow", "mechanical", "support", "line")
_LINE = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]{7,16})\): (\d{1,5})(?:,\s*(.*))?$")
_SXID = re.compile(r"SXid \(PCI:([0-9a-fA-F:.]{7,16})\): (\d{1,6}), (Fatal|Non-fatal)(.*)$", re.IGNORECASE)
_UNITS = (
    re.compile(r"\(GPC \d+, TPC \d+(?:, SM \d+)?\)"),
    re.compile(r"ENGINE \w+ (?:GPCCLIENT|HUBCLIENT)\w*"),
    re.compile(r"GPC ?\d+[, ]+TPC ?\d+(?:[, ]+SM ?\d+)?"),
)
_RECOVERY = re.compile(r"recovery action changed from .* to (?:0x[0-9a-fA-F]+ )?\(([^)]*)\)")
_PROCESS = re.compile(r"pid='?\d+'?")
_DEVICE = 154  # its line says what is to be done
_KEPT_EVENTS = 500


@dataclass(frozen=True)
class Rule:
    """One row of xid.csv. ``on_fail`` is empty where it is no fault; ``by_unit``: see the same-unit rule."""

    xid: int
    kind: str
    on_fail: OnFail | None
    by_unit: bool
    meaning: str


@dataclass(frozen=True)
class Event:
    """One Xid of one GPU (its PCI address), at seconds since boot; ``unit`` is the part of the GPU, if told."""

    at_s: float
    gpu: str
    xid: int
    unit: str
    text: str

    @property
    def process(self) -> str:
        """Whose GPU work it was, if the line says so."""
        found = _PROCESS.search(self.text)
        return found[0] if found else ""


@functools.cache
def policy(path: Path = POLICY) -> Mapping[int, Rule]:
    """By number. Raises UsageError where the table is not as it should be."""
    rules = {}
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    for row in csv.DictReader(lines):
        kind, on_fail = row["kind"], row["on_fail"]
        if not row["xid"].isdecimal() or kind not in CLASSES or on_fail not in ("", *ON_FAIL):
            raise UsageError(f"{path}: not a row: {row}")
        number = int(row["xid"])
        if number in rules:
            raise UsageError(f"{path}: Xid {number} is there twice")
        chosen: OnFail | None = next((one for one in ON_FAIL if one == on_fail), None)
        rules[number] = Rule(number, kind, chosen, row["by_unit"] == "yes", row["meaning"])
    return rules


def parse(lines: Iterable[Line]) -> list[Event]:
    """The Xids of a kernel log, in order. Pure."""
    events = []
    for line in lines:
        found = _LINE.search(line.text)
        if found:
            text = found[3] or ""
            unit = next((match[0] for match in (one.search(text) for one in _UNITS) if match), "")
            events.append(Event(line.at_s, address(found[1]), int(found[2]), unit, text))
    return events


def address(text: str) -> str:
    """A PCI address as the kernel's log writes it, without function: 0000:3b:00. Pure."""
    words = text.lower().split(".")[0].split(":")
    words = words if len(words) == 3 else ["0", *words]
    return ":".join([f"{int(words[0] or '0', 16):04x}", *words[1:3]])


def collapsed(events: Sequence[Event], burst_s: float) -> list[Event]:
    """Without those that follow the same one (GPU, number, unit) within ``burst_s``. Pure."""
    kept: list[Event] = []
    last: dict[tuple[str, int, str], float] = {}
    for event in sorted(events, key=lambda event: event.at_s):
        key = (event.gpu, event.xid, event.unit)
        if key not in last or event.at_s - last[key] > burst_s:
            kept.append(event)
        last[key] = event.at_s
    return kept


def judge(log: KernelLog, limits: Limits, former: Former) -> tuple[Iterable[Fault], object]:
    """Faults by GPU, the worst of each; keeps events that the kernel's log will forget. Pure."""
    window = limits.number("escalate_window_s")
    seen = {_key(event): event for event in [*_kept(former.kept), *parse(log.lines)]}
    oldest = max(former.now_s - window, former.cleared_s)
    events = [event for event in seen.values() if oldest < event.at_s]
    keep = [[e.at_s, e.gpu, e.xid, e.unit, e.text] for e in sorted(events, key=lambda e: e.at_s)[-_KEPT_EVENTS:]]
    found = faults(collapsed(events, limits.number("burst_s")), limits)
    return [_named(fault, log) for fault in found], keep


def _named(fault: Fault, log: KernelLog) -> Fault:
    """With the UUID and Slurm's index of the GPU, where the driver tells them: the PCI address is in the evidence."""
    uuid, index = log.gpus.get(fault.device, (fault.device, -1))
    return msgspec.structs.replace(fault, device=uuid, index=index)


def faults(events: Sequence[Event], limits: Limits) -> list[Fault]:
    """What single events ask for, and what they ask for together. ``events`` are collapsed. Pure."""
    found = []
    for gpu in dict.fromkeys(event.gpu for event in events):
        own = [event for event in events if event.gpu == gpu]
        ruled = [fault for fault in map(_single, _current(own)) if fault is not None]
        ruled += _same_unit(own, limits.number("same_unit"))
        hardware = [event for event in own if _is_hardware(event)]
        if len(hardware) >= limits.number("escalate"):
            numbers = ", ".join(str(event.xid) for event in hardware[-8:])
            text = f"GPU {gpu}: {len(hardware)} events of faulty hardware in a day (Xids {numbers})"
            ruled.append(Fault(text, gpu, on_fail="drain"))
        if ruled:
            found.append(max(ruled, key=lambda fault: ON_FAIL.index(fault.on_fail or "warn")))
    return found


def _single(event: Event) -> Fault | None:
    """What one event asks for; a number that is not in the table is said, and no more."""
    rule = policy().get(event.xid)
    action = rule.on_fail if rule else "warn"
    meaning = rule.meaning if rule else "not in our table"
    if event.xid == _DEVICE:
        action, meaning = _recovery(event.text)
    if action is None:
        return None
    return Fault(f"GPU {event.gpu}: Xid {event.xid} ({meaning}): {event.text}".rstrip(": "), event.gpu, on_fail=action)


def _current(events: Sequence[Event]) -> list[Event]:
    """Of the lines that change what is to be done, only the last counts."""
    changes = [event for event in events if event.xid == _DEVICE]
    return [event for event in events if event.xid != _DEVICE or event is changes[-1]]


def _recovery(text: str) -> tuple[OnFail | None, str]:
    """What Xid 154 says is to be done."""
    found = _RECOVERY.search(text)
    said = found[1] if found else ""
    if said == "None":
        return None, said
    if "reboot" in said.lower() or "drain" in said.lower():
        return "drain", said
    return ("evict", said) if "reset" in said.lower() else ("warn", said or "recovery action")


def _same_unit(events: Sequence[Event], least: float) -> list[Fault]:
    """By different processes: one that runs on one unit only would meet its own mistake there every time."""
    by_unit: dict[tuple[int, str], set[str]] = {}
    for event in events:
        rule = policy().get(event.xid)
        if rule and rule.by_unit and event.unit:
            by_unit.setdefault((event.xid, event.unit), set()).add(event.process or f"at {event.at_s}")
    gpu = events[0].gpu
    return [
        Fault(f"GPU {gpu}: Xid {xid} of {len(who)} processes on the same unit ({unit}): hardware", gpu, on_fail="evict")
        for (xid, unit), who in by_unit.items()
        if len(who) >= least
    ]


def _is_hardware(event: Event) -> bool:
    rule = policy().get(event.xid)
    return rule is not None and rule.kind in ("reset", "reboot", "workflow", "mechanical", "support")


def _key(event: Event) -> tuple[float, str, int]:
    return (event.at_s, event.gpu, event.xid)


def _kept(value: object) -> list[Event]:
    """Events that were kept, as far as they are what we keep."""
    events = []
    for one in value if isinstance(value, list) else ():
        if isinstance(one, list | tuple) and len(one) == 5:
            at, gpu, xid, unit, text = one
            texts = isinstance(gpu, str) and isinstance(unit, str) and isinstance(text, str)
            if isinstance(at, int | float) and isinstance(xid, int) and texts:
                events.append(Event(float(at), gpu, xid, unit, text))
    return events


def switches(log: KernelLog, limits: Limits, former: Former) -> tuple[Iterable[Fault], object]:
    """Fatal errors of NVSwitches; each line says itself whether it is fatal. Pure."""
    found = {}
    for line in log.lines:
        match = _SXID.search(line.text)
        if match and match[3].lower() == "fatal" and line.at_s > former.cleared_s:
            switch = address(match[1])
            found[switch] = Fault(f"NVSwitch {switch}: SXid {match[2]}{match[4]}", switch)
    return list(found.values()), None
