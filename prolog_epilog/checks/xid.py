"""Xids: the GPU errors that NVIDIA's driver writes to the kernel's log (``xid_events``), and the action for each.

``xid.csv`` has the meaning of each. Some rules go beyond one line. The same Xid of a GPU within minutes is one event.
Xids that a program may cause (13, 31) are hardware when different programs and users meet them on the same unit of the
GPU, and nowhere else. No reset repairs a GPU with several events of faulty hardware within a day. Xid 154 ends the
events that a reset has repaired.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from resilio_hpc.core.errors import UsageError
from resilio_hpc.prolog_epilog.base.check import ON_FAIL, Fault, Former, OnFail, Thresholds
from resilio_hpc.prolog_epilog.checks.kernel_log import KernelLog
from resilio_hpc.prolog_epilog.checks.xid_events import RECOVERY, XidEvent, address, collapsed, parse

POLICY = Path(__file__).with_name("xid.csv")
CLASSES = (
    "ignore", "software", "application", "reset", "reboot", "workflow", "mechanical", "support", "line", "undefined",
)  # fmt: skip
_SXID = re.compile(r"SXid \(PCI:([0-9a-fA-F:.]{7,16})\): (\d{1,6}), (Fatal|Non-fatal)(.*)$", re.IGNORECASE)
_RECOVERY_TEXT = re.compile(r"recovery action changed from .* to (?:0x[0-9a-fA-F]+ )?\(([^)]*)\)")
_RESET_DONE = re.compile(r"recovery action changed from .*\bReset\b.* to (?:0x[0-9a-fA-F]+ )?\(None\)")
_INTERPRETER = re.compile(r"(?:python|pypy|perl)[\d.]*|julia|java|node|R|MATLAB|bash|sh|pt_\w+|ray::.*")
"""Names that are those of many programs (``pt_main_thread``: PyTorch's)."""
_NONFATAL = re.compile(r"\bnon-?fatal\b", re.IGNORECASE)
_KEPT_EVENTS = 500


@dataclass(frozen=True)
class Rule:
    """One row of xid.csv.

    ``on_fail``: None where it is no fault; ``nonfatal``: instead of it where the line says so; ``by_unit``: see the
    same-unit rule.
    """

    xid: int
    kind: str
    on_fail: OnFail | None
    nonfatal: OnFail | None
    by_unit: bool
    meaning: str


@functools.cache
def policy(path: Path = POLICY) -> Mapping[int, Rule]:
    """Return the rows by number. Raises UsageError where the table is invalid."""
    rules = {}
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    for row in csv.DictReader(lines):
        kind, actions = row["kind"], [row["on_fail"], row["nonfatal"]]
        if not row["xid"].isdecimal() or kind not in CLASSES or not {"", *ON_FAIL}.issuperset(actions):
            raise UsageError(f"{path}: not a row: {row}")
        number = int(row["xid"])
        if number in rules:
            raise UsageError(f"{path}: Xid {number} is there twice")
        on_fail, nonfatal = (next((one for one in ON_FAIL if one == action), None) for action in actions)
        rules[number] = Rule(number, kind, on_fail, nonfatal, row["by_unit"] == "yes", row["meaning"])
    return rules


def judge(log: KernelLog, limits: Thresholds, former: Former) -> tuple[Iterable[Fault], object]:
    """Return faults by GPU, the worst of each; keep events that the kernel's log will forget. Pure."""
    window = limits.number("escalate_window_s")
    kept = _Kept.read(former.kept)
    seen = {_key(event): event for event in kept.events}
    for event in parse(log.lines):
        witnessed = kept.looked_s is not None and event.at_s > kept.looked_s
        known = replace(event, users=kept.users | log.users) if witnessed else event
        seen.setdefault(_key(event), known)
    oldest = max(former.now_s - window, former.cleared_s)
    events = [event for event in seen.values() if oldest < event.at_s]
    found = faults(events, limits)
    return [_named(fault, log) for fault in found], _Kept(events, log.users, former.now_s).written()


def _named(fault: Fault, log: KernelLog) -> Fault:
    """Return the fault with the GPU's UUID and Slurm's index, where the driver tells them.

    The evidence has the PCI address.
    """
    uuid, index = log.gpus.get(fault.device, (fault.device, -1))
    return msgspec.structs.replace(fault, device=uuid, index=index)


def faults(events: Sequence[XidEvent], limits: Thresholds) -> list[Fault]:
    """Return the faults of single events, and of several together. Pure."""
    found = []
    counted = collapsed(events, limits.number("burst_s"))
    for gpu in dict.fromkeys(event.gpu for event in counted):
        own = [event for event in counted if event.gpu == gpu]
        ruled = [fault for fault in map(_single, _current(own)) if fault is not None]
        all_own = [event for event in events if event.gpu == gpu]
        ruled += _same_unit(own, _units_of_processes(all_own), limits.number("same_unit"))
        hardware = [event for event in own if _is_hardware(event)]
        if len(hardware) >= limits.number("escalate"):
            numbers = ", ".join(str(event.xid) for event in hardware[-8:])
            text = f"GPU {gpu}: {len(hardware)} events of faulty hardware in a day (Xids {numbers})"
            ruled.append(Fault(text, gpu, on_fail="drain"))
        if ruled:
            found.append(max(ruled, key=lambda fault: ON_FAIL.index(fault.on_fail or "warn")))
    return found


def _single(event: XidEvent) -> Fault | None:
    """Return the fault of one event; a number that is not in the table is only reported."""
    rule = policy().get(event.xid)
    action = _action(event)
    meaning = rule.meaning if rule else "not in our table"
    if event.xid == RECOVERY:
        meaning = _recovery(event.text)[1]
    if action is None:
        return None
    return Fault(f"GPU {event.gpu}: Xid {event.xid} ({meaning}): {event.text}".rstrip(": "), event.gpu, on_fail=action)


def _action(event: XidEvent) -> OnFail | None:
    rule = policy().get(event.xid)
    if rule is None:
        return "warn"
    if event.xid == RECOVERY:
        return _recovery(event.text)[0]
    return rule.nonfatal if rule.nonfatal and _NONFATAL.search(event.text) else rule.on_fail


def _current(events: Sequence[XidEvent]) -> list[XidEvent]:
    """Return the events that still count: of lines that change the action, the last one.

    Where it is "None" after a reset, the events that asked for that reset do not count any more.
    """
    changes = [event for event in events if event.xid == RECOVERY]
    if not changes:
        return list(events)
    last = changes[-1]
    reset = _RESET_DONE.search(last.text) is not None
    return [
        event for event in events
        if event is last or not (event.xid == RECOVERY or (reset and event.at_s <= last.at_s and _by_reset(event)))
    ]  # fmt: skip


def _by_reset(event: XidEvent) -> bool:
    rule = policy().get(event.xid)
    return rule is not None and rule.kind in ("reset", "workflow")


def _recovery(text: str) -> tuple[OnFail | None, str]:
    """Return the action that Xid 154 asks for."""
    found = _RECOVERY_TEXT.search(text)
    said = found[1] if found else ""
    if said == "None":
        return None, said
    if "reboot" in said.lower() or "drain" in said.lower():
        return "drain", said
    return ("evict", said) if "reset" in said.lower() else ("warn", said or "recovery action")


def _units_of_processes(events: Sequence[XidEvent]) -> Mapping[tuple[int, str], set[str]]:
    found: dict[tuple[int, str], set[str]] = {}
    for event in events:
        if event.process is not None and event.unit:
            found.setdefault((event.xid, event.process[0]), set()).add(event.unit)
    return found


def _same_unit(events: Sequence[XidEvent], units: Mapping[tuple[int, str], set[str]], least: float) -> list[Fault]:
    """Return faults of a unit by processes that met the Xid there only: a program's mistake shows on every unit."""
    by_unit: dict[tuple[int, str], dict[str, XidEvent]] = {}
    for event in events:
        rule = policy().get(event.xid)
        if rule and rule.by_unit and event.process is not None:
            process = event.process[0]
            if units.get((event.xid, process)) == {event.unit}:
                by_unit.setdefault((event.xid, event.unit), {}).setdefault(process, event)
    gpu = events[0].gpu
    return [
        Fault(f"GPU {gpu}: Xid {xid} of {len(who)} processes on the same unit ({unit}): hardware", gpu, on_fail="evict")
        for (xid, unit), who in by_unit.items()
        if len(who) >= least and not _one_culprit(list(who.values()))
    ]


def _one_culprit(events: Sequence[XidEvent]) -> bool:
    """Return whether it may have been one program, started again and again, or one user's."""
    names = {event.process[1] for event in events if event.process is not None}
    if len(names) == 1 and not _INTERPRETER.fullmatch(next(iter(names))):
        return True
    return bool(frozenset.intersection(*(event.users for event in events)))


def _is_hardware(event: XidEvent) -> bool:
    rule = policy().get(event.xid)
    hardware = rule is not None and rule.kind in ("reset", "reboot", "workflow", "mechanical", "support")
    return hardware and _action(event) != "warn"


def _key(event: XidEvent) -> tuple[float, str, int, str]:
    return (event.at_s, event.gpu, event.xid, event.text)


@dataclass(frozen=True)
class _Kept:
    """What is kept from look to look: events, and whose programs were on the node at the last one (``looked_s``)."""

    events: Sequence[XidEvent]
    users: frozenset[int] = frozenset()
    looked_s: float | None = None

    def written(self) -> dict[str, object]:
        """Return it for JSON. Of too many events, those of faulty hardware and the newest are kept."""
        ranked = sorted(self.events, key=lambda event: (_is_hardware(event) or event.xid == RECOVERY, event.at_s))
        newest = sorted(ranked[-_KEPT_EVENTS:], key=lambda event: event.at_s)
        events = [[one.at_s, one.gpu, one.xid, one.unit, one.text, sorted(one.users)] for one in newest]
        return {"events": events, "users": sorted(self.users), "looked_s": self.looked_s}

    @classmethod
    def read(cls, value: object) -> _Kept:
        """Read it, as far as it is valid."""
        try:
            found = msgspec.convert(value, _Written)
        except msgspec.ValidationError:
            return cls(())
        events = [XidEvent(at, gpu, xid, unit, text, frozenset(who)) for at, gpu, xid, unit, text, who in found.events]
        return cls(events, frozenset(found.users), found.looked_s)


class _Written(msgspec.Struct, frozen=True):
    events: list[tuple[float, str, int, str, str, list[int]]]
    users: list[int]
    looked_s: float


def switches(log: KernelLog, limits: Thresholds, former: Former) -> tuple[Iterable[Fault], object]:
    """Return fatal errors of NVSwitches; each line says itself whether it is fatal. Pure."""
    found = {}
    for line in log.lines:
        match = _SXID.search(line.text)
        if match and match[3].lower() == "fatal" and line.at_s > former.cleared_s:
            switch = address(match[1])
            found[switch] = Fault(f"NVSwitch {switch}: SXid {match[2]}{match[4]}", switch)
    return list(found.values()), None
