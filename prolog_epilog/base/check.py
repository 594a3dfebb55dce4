"""A health check, its findings, and the verdict on a node, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import msgspec

from resilio_hpc.core.errors import HealthError
from resilio_hpc.core.json_fields import printable

OnFail = Literal["warn", "evict", "fail", "drain"]
"""Say it; take the device out of use; let the prolog fail, so that this job starts elsewhere; drain the node."""

Severity = Literal["warning", "error", "fatal"]

Context = Literal["health", "idle", "start"]
"""In the background at any time; there, but only while no job is on the node; before ranks (re)start."""

Status = Literal["pass", "fail", "unknown", "timeout", "absent"]
"""``unknown``: it could not be read, which never drains. ``absent``: this node has nothing of the kind."""

ON_FAIL: tuple[OnFail, ...] = get_args(OnFail)
CONTEXTS: tuple[Context, ...] = get_args(Context)

Limit = bool | int | float | str | list[str]
Value = bool | int | float
"""What is worth knowing of a device: more is better, so True is better than False."""

EVIDENCE_CHARACTERS = 200
REASON_PREFIX = "resilio:"
"""Every drain reason of ours begins with it; no other's does."""


class Unreadable(HealthError):
    """What a check reads is missing, not permitted, or invalid: no result, which counts against the node."""


class Absent(HealthError):
    """The node lacks the device or service that this check is about."""


class Thresholds:
    """The thresholds of a check, from its table; the shipped table has every name that is asked for."""

    def __init__(self, values: Mapping[str, Limit]) -> None:
        self._values = values

    def number(self, name: str) -> float:
        value = self._values[name]
        assert isinstance(value, int | float)
        return float(value)

    def text(self, name: str) -> str:
        return str(self._values[name])

    def texts(self, name: str) -> list[str]:
        value = self._values[name]
        assert isinstance(value, list)
        return value


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of the tables in ``checks/``. ``source``: which fetcher it reads; checks of one source share a child.

    ``summary``: the meaning of a pass; ``reason``: what an administrator reads in Slurm; ``origin``: where the
    threshold or the meaning comes from.
    """

    id: str
    source: str
    contexts: tuple[Context, ...]
    budget_s: float
    on_fail: OnFail
    severity: Severity
    reason: str
    summary: str
    origin: str
    on_timeout: OnFail = "warn"
    every_s: float = 60.0
    enabled: bool = True
    limits: dict[str, Limit] = {}


class Fault(msgspec.Struct, frozen=True):
    """A fault of the node, or of one ``device`` of it. ``on_fail`` is set where it is not the check's own.

    ``index``: of a GPU, as Slurm counts them (SLURM_JOB_GPUS); -1 otherwise.
    """

    evidence: str
    device: str = ""
    index: int = -1
    on_fail: OnFail | None = None


class Doubt(Fault, frozen=True):
    """One part of a check's subject could not be read: reported, while the check goes on with the other parts."""

    on_fail: OnFail | None = "warn"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """How a check ended. ``note``: why it is not ``pass`` or ``fail``; ``uptime_s``: when it was."""

    check: str
    status: Status
    on_fail: OnFail
    severity: Severity
    faults: tuple[Fault, ...] = ()
    note: str = ""
    seconds: float = 0.0
    uptime_s: float = 0.0


class HealthFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A result that an administrator must know of, with the action for it."""

    check: str
    action: OnFail
    severity: Severity
    evidence: str
    device: str = ""
    index: int = -1


class NodeVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a node at one time, in seconds since boot, which no change of the clock moves.

    ``withheld``: why no action may follow, such as a storm of drains; prologs then only print the findings.
    ``leave_until_s``: a prolog that fails makes Slurm drain the node; until then the storm breaker permits it.
    """

    node: str
    boot: str
    uptime_s: float
    unix_s: float
    results: tuple[Result, ...]
    gpus: int = 0
    withheld: str = ""
    leave_until_s: float = 0.0
    v: int = 1

    @property
    def findings(self) -> tuple[HealthFinding, ...]:
        """Return the findings, the worst first."""
        found = [finding for result in self.results for finding in _findings(result)]
        return tuple(sorted(found, key=lambda finding: (-ON_FAIL.index(finding.action), finding.check)))

    @property
    def action(self) -> OnFail | Literal["none"]:
        """Return the action of the worst finding, as far as it may be carried out."""
        worst = next((finding.action for finding in self.findings), None)
        if worst is None:
            return "none"
        return "warn" if self.withheld else worst


def _findings(result: Result) -> Iterable[HealthFinding]:
    if result.status in ("pass", "absent"):
        return
    for fault in result.faults:
        yield HealthFinding(
            check=result.check,
            action=fault.on_fail or result.on_fail,
            severity=result.severity,
            evidence=printable(fault.evidence, EVIDENCE_CHARACTERS),
            device=printable(fault.device, 80),
            index=fault.index,
        )
    if not result.faults:
        evidence = printable(result.note, EVIDENCE_CHARACTERS)
        action: OnFail = result.on_fail if result.status == "timeout" else "warn"
        yield HealthFinding(check=result.check, action=action, severity="warning", evidence=evidence)


@dataclass(frozen=True)
class Former:
    """What a check kept at its last run (JSON), or None, and the present time, in seconds since boot.

    ``cleared_s``: when an administrator last said that the findings are repaired. ``normal``: by device, the node's
    baseline of this check; None without a baseline.
    """

    kept: object
    now_s: float
    cleared_s: float = -1.0
    normal: Mapping[str, Value] | None = None


@dataclass(frozen=True)
class DeviceHistory:
    """The known value of each device: by the baseline, or else the best since the node was started."""

    normal: Mapping[str, Value] = field(default_factory=dict)
    seen: Mapping[str, Value] = field(default_factory=dict)

    def of(self, device: str) -> Value | None:
        """Return the baseline's value, else the best seen since the node was started; None for a new device."""
        return self.normal[device] if device in self.normal else self.seen.get(device)

    def expected(self, device: str, alike: Value) -> Value:
        """Return the baseline's word, else the better of the device's past and of ``alike``.

        The best of its kind here.
        """
        return self.normal[device] if device in self.normal else max(self.seen.get(device, alike), alike)

    def action(self, device: str, now: Value) -> OnFail | None:
        """Return a fault's action: the check's own (None) where the device was better before, else a warning."""
        before = self.of(device)
        return None if before is not None and before > now else "warn"
