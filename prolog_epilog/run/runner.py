"""Runs checks, each in a killable child with its time budget, several at a time; names and leaves what hangs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from resilio_hpc.prolog_epilog.base.check import (
    Absent,
    Check,
    Doubt,
    Fault,
    Former,
    Result,
    Status,
    Thresholds,
    Unreadable,
    Value,
)
from resilio_hpc.prolog_epilog.base.isolated import Child, Ended, Mark, Stuck, gather, still_there
from resilio_hpc.prolog_epilog.base.mounts import MOUNTINFO, Mount, culprit, parse_mountinfo
from resilio_hpc.prolog_epilog.base.node import NodeView
from resilio_hpc.prolog_epilog.base.probe import Probe, Source
from resilio_hpc.prolog_epilog.run.baseline import Values

PARALLEL = 4
_WORSE: tuple[Status, ...] = ("absent", "pass", "unknown", "timeout", "fail")


class StuckSince(msgspec.Struct, frozen=True):
    """A child that no signal ends, what it waits for, and since when (seconds since boot)."""

    pid: int
    started: int
    since_s: float
    text: str


class RunMemory(msgspec.Struct):
    """What is kept from run to run, as long as the node is up: by check and target, and by source and target.

    ``normal``: the node's baseline by check, empty where there is none; None until it was looked for.
    """

    kept: dict[str, object] = {}
    stuck: dict[str, StuckSince] = {}
    cleared: dict[str, float] = {}
    normal: Values | None = None

    def clear(self, check: str, now_s: float) -> None:
        """Begin again: the findings of this check until now are repaired."""
        self.kept = {key: value for key, value in self.kept.items() if key.partition(" ")[0] != check}
        self.cleared[check] = now_s


class _Answer(msgspec.Struct, frozen=True):
    """The answer of one check, from the child."""

    check: str
    status: Status
    faults: tuple[Fault, ...] = ()
    note: str = ""
    kept: object = None
    learned: dict[str, Value] = {}


@dataclass(frozen=True)
class _Group:
    """Checks that judge one reading of one target."""

    source: str
    target: str
    checks: tuple[Check, ...]

    @property
    def name(self) -> str:
        return f"{self.source} {self.target}".rstrip()

    @property
    def budget_s(self) -> float:
        return max(check.budget_s for check in self.checks)


@dataclass(frozen=True)
class CheckRunner:
    """Runs checks. ``probes``: by check, ``sources``: by name; ``clock``: seconds since boot.

    ``child`` starts work with a budget in seconds. ``learned``: by check, the values for a baseline.
    """

    sources: Mapping[str, Source]
    probes: Mapping[str, Probe]
    node: NodeView
    clock: Callable[[], float]
    parallel: int = PARALLEL
    memory: RunMemory = field(default_factory=RunMemory)
    child: Callable[[Callable[[Mark], bytes], float], Child] = Child
    learned: Values = field(default_factory=dict)

    def run(self, checks: Sequence[Check]) -> list[Result]:
        """Return one result per check, in order. It takes no longer than the budgets of its groups, whatever hangs."""
        mounts = _mounts(self.node)
        parts: dict[str, list[Result]] = {check.id: [] for check in checks}
        waiting = self._groups(checks, parts)
        running: list[Child] = []
        of: dict[int, _Group] = {}

        def begin() -> None:
            while waiting and len(running) < self.parallel:
                group = waiting.pop(0)
                still = self._still_stuck(group)
                if still:
                    self._lay(parts, group, still, 0.0)
                    continue
                child = self.child(self._work(group), group.budget_s)
                of[child.pid] = group
                running.append(child)

        def end(child: Child, ended: Ended) -> None:
            self._take(of[child.pid], ended, mounts, parts)
            begin()

        begin()
        gather(running, end)
        return [_merged(check, parts[check.id], self.clock()) for check in checks]

    def _groups(self, checks: Sequence[Check], parts: dict[str, list[Result]]) -> list[_Group]:
        groups = []
        for source in dict.fromkeys(check.source for check in checks):
            own = tuple(check for check in checks if check.source == source)
            try:
                targets = self.sources[source].targets(self.node)
            except Unreadable as error:
                for check in own:
                    parts[check.id].append(self._result(check, "unknown", note=str(error)))
                continue
            for check in own:
                self._forget_others(check, targets)
            groups += [_Group(source, target, own) for target in targets]
        return groups

    def _forget_others(self, check: Check, targets: Sequence[str]) -> None:
        """Forget targets that are gone: users' home directories come and go by the thousand."""
        own = {_key(check.id, target) for target in targets}
        for key in [key for key in self.memory.kept if key.partition(" ")[0] == check.id and key not in own]:
            del self.memory.kept[key]

    def _work(self, group: _Group) -> Callable[[Mark], bytes]:
        def work(mark: Mark) -> bytes:
            node = replace(self.node, target=group.target, mark=mark)
            answers = list(self._answers(group, node))
            return msgspec.json.encode(answers)

        return work

    def _answers(self, group: _Group, node: NodeView) -> Iterable[_Answer]:
        """Read once and judge each, in the child.

        An error of this code is reported, and does not count against the node.
        """
        try:
            reading = self.sources[group.source].fetch(node)
        except Absent as error:
            return [self._absent(check, str(error), group.target) for check in group.checks]
        except Exception as error:  # noqa: BLE001  the line is all that leaves this process
            return [_Answer(check.id, "unknown", note=_told(error)) for check in group.checks]
        return [self._judged(check, group.target, reading) for check in group.checks]

    def _judged(self, check: Check, target: str, reading: object) -> _Answer:
        kept = self.memory.kept.get(_key(check.id, target))
        learned: Mapping[str, Value] = {}
        try:
            former = Former(kept, self.clock(), self.memory.cleared.get(check.id, -1.0), self._normal(check))
            learned = self._learned(check, reading)
            judged, keep = self.probes[check.id].remembers(reading, Thresholds(check.limits), former)
            found = tuple(judged)
        except Absent as error:
            return _Answer(check.id, "absent", note=str(error), kept=kept, learned=dict(learned))
        except Exception as error:  # noqa: BLE001
            return _Answer(check.id, "unknown", note=_told(error), kept=kept)
        faults = self._settled(check, [fault for fault in found if not isinstance(fault, Doubt)])
        doubts = "; ".join(dict.fromkeys(fault.evidence for fault in found if isinstance(fault, Doubt)))
        status: Status = "fail" if faults else "unknown" if doubts else "pass"
        return _Answer(check.id, status, faults, doubts, keep, dict(learned))

    def _learned(self, check: Check, reading: object) -> Mapping[str, Value]:
        learns = self.probes[check.id].normal
        return {} if learns is None else learns(reading)

    def _absent(self, check: Check, why: str, target: str) -> _Answer:
        """Return the answer that the node lacks the device: a fault where its baseline has it."""
        normal = self._normal(check) or {}
        if target or not any(normal.values()):
            return _Answer(check.id, "absent", note=why)
        gone = [name for name, value in normal.items() if value]
        fault = Fault(f"{why}, and the baseline has {', '.join(gone[:8])}")
        return _Answer(check.id, "fail", self._settled(check, [fault]))

    def _normal(self, check: Check) -> Mapping[str, Value] | None:
        return None if self.memory.normal is None else self.memory.normal.get(check.id)

    def _settled(self, check: Check, faults: Sequence[Fault]) -> tuple[Fault, ...]:
        """Return faults as warnings soon after a boot: links, drivers and mounts need their time to come up."""
        settle_s = check.limits.get("settle_s", 0)
        if isinstance(settle_s, int | float) and self.clock() < settle_s:
            return tuple(msgspec.structs.replace(fault, on_fail="warn") for fault in faults)
        return tuple(faults)

    def _take(self, group: _Group, ended: Ended, mounts: Sequence[Mount], parts: dict[str, list[Result]]) -> None:
        if ended.answer is not None:
            for answer in msgspec.json.decode(ended.answer, type=list[_Answer]):
                check = next(check for check in group.checks if check.id == answer.check)
                result = self._result(check, answer.status, answer.faults, answer.note, ended.seconds)
                parts[check.id].append(result)
                if answer.learned:
                    self.learned.setdefault(check.id, {}).update(answer.learned)
                if answer.kept is not None:
                    self.memory.kept[_key(check.id, group.target)] = answer.kept
            return
        who = culprit(ended.touched, mounts)
        if not ended.overdue:
            for check in group.checks:
                note = f"the check was ended by signal {ended.signal} at {who}"
                parts[check.id].append(self._result(check, "unknown", note=note, seconds=ended.seconds))
            return
        text = f"{who}: no answer in {group.budget_s:g} s"
        if ended.stuck:
            self._remember(group, ended.stuck, who)
            text += f", and its child {ended.stuck.pid} cannot be killed ({ended.stuck.where})"
        self._lay(parts, group, text, ended.seconds)

    def _remember(self, group: _Group, stuck: Stuck, who: str) -> None:
        since = StuckSince(stuck.pid, stuck.started, self.clock(), f"{who} ({stuck.where})")
        self.memory.stuck[group.name] = since

    def _still_stuck(self, group: _Group) -> str:
        """Return the message for a group whose last child still hangs: another one would only hang beside it."""
        stuck = self.memory.stuck.get(group.name)
        if stuck is None:
            return ""
        if not still_there(stuck.pid, stuck.started):
            del self.memory.stuck[group.name]
            return ""
        return f"{stuck.text}: no answer for {self.clock() - stuck.since_s:.0f} s, child {stuck.pid} cannot be killed"

    def _lay(self, parts: dict[str, list[Result]], group: _Group, text: str, seconds: float) -> None:
        for check in group.checks:
            fault = Fault(text, group.target, on_fail=check.on_timeout)
            parts[check.id].append(self._result(check, "timeout", (fault,), seconds=seconds))

    def _result(
        self, check: Check, status: Status, faults: Iterable[Fault] = (), note: str = "", seconds: float = 0.0
    ) -> Result:
        return Result(
            check=check.id,
            status=status,
            on_fail=check.on_fail,
            severity=check.severity,
            faults=tuple(faults),
            note=note,
            seconds=round(seconds, 4),
            uptime_s=self.clock(),
        )


def _merged(check: Check, parts: Sequence[Result], now_s: float) -> Result:
    """Return one result of those of all targets: the worst status, every fault."""
    if not parts:
        return Result(check=check.id, status="absent", on_fail=check.on_fail, severity=check.severity, uptime_s=now_s)
    worst = max(parts, key=lambda part: _WORSE.index(part.status))
    faults = tuple(fault for part in parts for fault in part.faults)
    notes = "; ".join(dict.fromkeys(part.note for part in parts if part.note and part.status == worst.status))
    return msgspec.structs.replace(worst, faults=faults, note=notes, seconds=max(part.seconds for part in parts))


def _mounts(node: NodeView) -> list[Mount]:
    try:
        return parse_mountinfo(node.files.text(MOUNTINFO))
    except Unreadable:
        return []


def _told(error: Exception) -> str:
    if isinstance(error, Unreadable):
        return str(error)
    return f"the check itself failed: {type(error).__name__}: {error}"


def _key(check: str, target: str) -> str:
    return f"{check} {target}".rstrip()
