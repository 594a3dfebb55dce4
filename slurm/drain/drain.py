"""Whether this package may drain or undrain a node, given what Slurm says of it. Pure: this decides, others act.

It never touches a drain of another owner, one that Slurm made itself, and one that it cannot read.
"""

from __future__ import annotations

import csv
import enum
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from resilio_hpc.slurm.client.model import Node
from resilio_hpc.slurm.drain.reason import Finding, read_reason, write_reason

PROLOG_ERROR = "Prolog error"  # Slurm's reason: slurm_reasons.csv
_TABLE = Path(__file__).with_name("slurm_reasons.csv")


class Action(enum.Enum):
    """What to do. LEAVE: another owner's; UNKNOWN: not readable, so nothing is written."""

    DRAIN = "drain"
    REWORD = "reword"
    UNDRAIN = "undrain"
    NOTHING = "nothing"
    LEAVE = "leave"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class DrainDecision:
    """The decision. ``why``: as text; ``reason``: the text to write, for DRAIN and REWORD."""

    action: Action
    why: str
    reason: str = ""

    @property
    def writes(self) -> bool:
        return self.action in (Action.DRAIN, Action.REWORD, Action.UNDRAIN)


@dataclass(frozen=True)
class SlurmReason:
    """A row of slurm_reasons.csv."""

    begins: str
    replaceable: bool
    offer: bool


@cache
def slurm_reasons() -> tuple[SlurmReason, ...]:
    """Slurm's own reasons, from the table in the package."""
    lines = [line for line in _TABLE.read_text().splitlines() if not line.startswith("#")]
    rows = csv.DictReader(lines)
    return tuple(SlurmReason(row["begins"], row["replaceable"] == "yes", row["offer"] == "yes") for row in rows)


def slurms_own(reason: str) -> SlurmReason | None:
    """Return the row that fits a reason which Slurm wrote itself; None for any other."""
    return next((row for row in slurm_reasons() if reason.startswith(row.begins)), None)


def decide_drain(node: Node | None, finding: Finding) -> DrainDecision:
    """Decide about a drain; ``node``: Slurm's present answer, None when Slurm knows no such node."""
    unreadable = _unreadable(node)
    if unreadable or node is None:
        return unreadable or DrainDecision(Action.UNKNOWN, "")
    ours = read_reason(node.reason)
    if node.state.drain and ours is not None:
        if any(one.check == finding.check for one in ours):
            return DrainDecision(Action.NOTHING, f"drained by us already: {node.reason}")
        return DrainDecision(
            Action.REWORD, f"drained by us already, also for {finding.check}", write_reason([*ours, finding])
        )
    if node.state.drain:
        return DrainDecision(Action.LEAVE, f"drained already {_by(node)}")
    if not node.state.in_service and _held(node):
        return DrainDecision(Action.LEAVE, f"{node.state} already {_by(node)}")
    return DrainDecision(Action.DRAIN, f"is {node.state}", write_reason([finding]))


def decide_undrain(node: Node | None, check: str | None, passes: int, passes_needed: int) -> DrainDecision:
    """Decide about an undrain; ``check``: whose hold ends, None: all. ``passes``: passes of the check in a row."""
    unreadable = _unreadable(node)
    if unreadable or node is None:
        return unreadable or DrainDecision(Action.UNKNOWN, "")
    if not node.state.drain:
        return DrainDecision(Action.NOTHING, f"not drained: {node.state}")
    ours = read_reason(node.reason)
    if ours is None:
        by_prolog = node.reason.startswith(PROLOG_ERROR)
        hint = "; where it was our prolog that failed, the node's daemon takes it over within minutes"
        return DrainDecision(Action.LEAVE, f"not drained by us, but {_by(node)}{hint if by_prolog else ''}")
    rest = [one for one in ours if check is not None and one.check != check]
    if len(rest) == len(ours):
        return DrainDecision(Action.NOTHING, f"not drained for {check}: {node.reason}")
    if passes < passes_needed:
        return DrainDecision(Action.NOTHING, f"{passes} of {passes_needed} passes in a row: {node.reason}")
    if rest:
        held = ", ".join(one.check for one in rest)
        return DrainDecision(Action.REWORD, f"{check} has passed; {held} still holds it", write_reason(rest))
    return DrainDecision(Action.UNDRAIN, f"drained by us: {node.reason}")


ADOPTED_WITHIN_S = 600.0
_CLOCKS_S = 60.0  # slurmctld's clock and this one's may differ


def decide_adopt(node: Node | None, finding: Finding, failed_s: float) -> DrainDecision:
    """Decide whether a drain of Slurm's for a failed prolog came from this package's own prolog, which failed then.

    ``failed_s``: Unix seconds.
    """
    unreadable = _unreadable(node)
    if unreadable or node is None:
        return unreadable or DrainDecision(Action.UNKNOWN, "")
    if not node.state.drain or not node.reason.startswith(PROLOG_ERROR):
        return DrainDecision(Action.NOTHING, f"not drained for a failed prolog: {node.state}")
    if node.reason_time is None or not -_CLOCKS_S <= node.reason_time - failed_s <= ADOPTED_WITHIN_S:
        return DrainDecision(Action.LEAVE, "drained by Slurm for another failed prolog")
    return DrainDecision(Action.REWORD, f"our prolog had failed: {node.reason}", write_reason([finding]))


def decide_slurms_own(node: Node | None, passes: int, passes_needed: int) -> DrainDecision:
    """Decide whether a drain that Slurm made itself, of the kind that passes ("Kill task failed"), could be ended.

    UNDRAIN is an offer here: a person takes it (``resilio undrain --kill-task-failed``).
    """
    unreadable = _unreadable(node)
    if unreadable or node is None:
        return unreadable or DrainDecision(Action.UNKNOWN, "")
    row = slurms_own(node.reason)
    if not node.state.drain or row is None or not row.offer:
        return DrainDecision(Action.LEAVE, f"{node.state}, {_by(node)}: not a drain of Slurm's that passes")
    if passes < passes_needed:
        return DrainDecision(Action.NOTHING, f"{passes} of {passes_needed} passes in a row: {node.reason}")
    return DrainDecision(Action.UNDRAIN, f"drained by Slurm: {node.reason}")


def _unreadable(node: Node | None) -> DrainDecision | None:
    if node is None:
        return DrainDecision(Action.UNKNOWN, "Slurm knows no such node")
    if not node.state.known:
        return DrainDecision(Action.UNKNOWN, f"state {node.state} is not understood")
    return (
        DrainDecision(Action.LEAVE, "is not part of the cluster yet (FUTURE)") if node.state.base == "FUTURE" else None
    )


def _held(node: Node) -> bool:
    """Return whether a node is out of service for a reason that must stay."""
    row = slurms_own(node.reason)
    return bool(node.reason) and read_reason(node.reason) is None and not (row is not None and row.replaceable)


def _by(node: Node) -> str:
    if not node.reason:
        return "without a reason"
    who = "Slurm" if slurms_own(node.reason) else node.reason_by or "a user"
    return f"by {who}: {node.reason}"
