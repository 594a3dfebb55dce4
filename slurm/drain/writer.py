"""Safe drains: compare, write, read again, and disown a drain that may belong to another owner.

slurmctld has no compare-and-swap: an order to drain replaces any reason, and UNDRAIN ends any drain. So the node is
read right before each write, and again after it. An order of another owner between those two calls (some 10 ms) does
not show in the node; but slurmctld counts its orders. If another one came at that moment, the node stays drained for a
reason without owner, so that a person looks. (Not for this package's own drains of other nodes, which show there: in a
storm many nodes write at the same moment.) What remains: the text of that other drain is lost; and a drain that Slurm
itself makes in those 10 ms, which is not an order, is not noticed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import msgspec

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.slurm.client.client import SlurmClient
from resilio_hpc.slurm.client.model import Node
from resilio_hpc.slurm.client.slurm_errors import Unanswered
from resilio_hpc.slurm.client.update_count import came_alone, count_with_ours
from resilio_hpc.slurm.drain.drain import (
    PROLOG_ERROR,
    Action,
    DrainDecision,
    decide_adopt,
    decide_drain,
    decide_slurms_own,
    decide_undrain,
)
from resilio_hpc.slurm.drain.outcome import DrainOutcome, DrainResult
from resilio_hpc.slurm.drain.policy import DrainPolicy
from resilio_hpc.slurm.drain.reason import BY_HAND, PREFIX, Finding, disowned_reason
from resilio_hpc.slurm.drain.storm_breaker import Storm, no_room
from resilio_hpc.slurm.drain.storm_guard import StormGuard
from resilio_hpc.slurm.orders.audit import AuditEntry, AuditLog

ACT, OBSERVE, DRY_RUN = "act", "observe", "dry-run"
"""Modes: write; write to the audit log only what would be done; neither."""


_RESULTS = {
    Action.DRAIN: DrainResult.DRAINED,
    Action.REWORD: DrainResult.REWORDED,
    Action.UNDRAIN: DrainResult.UNDRAINED,
    Action.NOTHING: DrainResult.NOTHING,
    Action.LEAVE: DrainResult.LEFT,
    Action.UNKNOWN: DrainResult.UNKNOWN,
}


class DrainWriter:
    """The one way to drain and undrain, for health checks, commands and the governor alike."""

    def __init__(
        self,
        client: SlurmClient,
        policy: DrainPolicy,
        audit: AuditLog,
        mode: str = ACT,
        breaker: bool = True,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if mode not in (ACT, OBSERVE, DRY_RUN):
            raise ValueError(f"no such mode: {mode}")
        self._client = client
        self._policy = policy
        self._audit = audit
        self._mode = mode
        self._breaker = breaker
        self._clock = clock
        self._sleep = sleep

    @property
    def audit_problem(self) -> str:
        """Return why the audit log is not complete; "" when it is."""
        return self._audit.problem

    def drain(self, node: str, finding: Finding) -> DrainOutcome:
        """Drain a node for a check that failed, unless it is another owner's or the storm breaker refuses."""
        act = _Act(self, node, "drain", finding.check, finding.evidence)
        return act.write(lambda now: decide_drain(now, finding))

    def room(self, node: str) -> str:
        """Return "" where one more node may be drained since its prolog fails; else why not. Raises SlurmError."""
        if self._mode != ACT:
            return "only observing"
        now = self._clock()
        storm = no_room(self._client.nodes(), node, now, self._policy, PROLOG_ERROR) if self._breaker else None
        return str(storm) if storm is not None else ""

    def undrain(self, node: str, check: str | None = None, passes: int | None = None) -> DrainOutcome:
        """End this package's drain, of one check or (None) of all, after ``passes`` (None: enough) passes in a row."""
        needed = self._policy.passes
        passed = needed if passes is None else passes
        act = _Act(self, node, "undrain", check or "", "")
        return act.write(lambda now: decide_undrain(now, check, passed, needed))

    def adopt(self, node: str, finding: Finding, failed_s: float) -> DrainOutcome:
        """Give this package's reason to a drain that Slurm made since its own prolog had failed.

        ``failed_s``: when that was, in Unix seconds.
        """
        act = _Act(self, node, "adopt", finding.check, finding.evidence)
        return act.write(lambda now: decide_adopt(now, finding, failed_s))

    def recheck(self, node: str, passes: int) -> DrainOutcome:
        """Decide whether a drain that Slurm made itself ("Kill task failed") could be ended; nothing is written."""
        act = _Act(self, node, "recheck", "", "")
        return act.offer(lambda now: decide_slurms_own(now, passes, self._policy.passes))

    def resume_slurms_own(self, node: str) -> DrainOutcome:
        """Take that offer, for a person who has looked."""
        act = _Act(self, node, "undrain", BY_HAND, "")
        return act.write(lambda now: decide_slurms_own(now, self._policy.passes, self._policy.passes))


class _Act:
    """One node and one wish, from the comparison to the outcome in the audit log."""

    def __init__(self, writer: DrainWriter, node: str, act: str, check: str, evidence: str) -> None:
        self._w = writer
        self._client = writer._client
        self._node = node
        self._entry = AuditEntry(
            time=writer._clock(), step="outcome", act=act, node=node, mode=writer._mode, check=check,
            evidence=printable(evidence),
        )  # fmt: skip
        self._before: Node | None = None
        self._after: Node | None = None
        self._written = ""
        self._orders = 0
        self._guard = StormGuard(self._client, writer._policy, writer._clock, node, check)

    def offer(self, decide: Callable[[Node | None], DrainDecision]) -> DrainOutcome:
        try:
            decision = decide(self._read())
        except SlurmError as error:
            return self._failed(error, DrainResult.UNKNOWN)
        if not decision.writes:
            return self._not_written(decision)
        return self._outcome(DrainResult.OFFERED, f"{decision.why}; resilio undrain --kill-task-failed {self._node}")

    def write(self, decide: Callable[[Node | None], DrainDecision]) -> DrainOutcome:
        """Compare, record the intention, and carry it out."""
        try:
            decision = decide(self._read())
            if not decision.writes:
                storm = self._came_too_late(decision)
                return self._not_written(decision) if storm is None else self._take_back(storm)
            storm = self._guard.ahead() if self._guarded(decision) else None
            if storm is not None:
                return self._held_back(storm)
            if self._w._mode != ACT:
                return self._outcome(DrainResult.WOULD_ACT, f"{decision.action.value}: {decision.why}", decision.reason)
            self._record("intent", decision.action.value, decision.why, decision.reason)
            outcome = self._carry_out(decide)
            if outcome.result is DrainResult.DRAINED and self._guarded(decision):
                storm = self._guard.too_many()
            if storm is not None:
                return self._take_back(storm)
        except SlurmError as error:
            return self._failed(error, DrainResult.REFUSED)
        if outcome.result is not DrainResult.NOTHING:
            self._record("outcome", outcome.result, outcome.why, self._written)
        return outcome

    def _guarded(self, decision: DrainDecision) -> bool:
        """Return whether the storm breaker has a say."""
        return decision.action is Action.DRAIN and self._w._breaker

    def _came_too_late(self, decision: DrainDecision) -> Storm | None:
        """Return the storm if the drain that this one would repeat was one too many."""
        repeats = self._entry.act == "drain" and decision.action is Action.NOTHING
        if not repeats or self._before is None or not self._w._breaker or self._w._mode != ACT:
            return None
        return self._guard.came_too_late(self._before)

    def _take_back(self, storm: Storm) -> DrainOutcome:
        self._carry_out(lambda now: decide_undrain(now, self._entry.check, 1, 1))
        return self._held_back(storm, "; drained at the same time as others, and taken back")

    def _held_back(self, storm: Storm, more: str = "") -> DrainOutcome:
        return self._outcome(DrainResult.SHARED if storm.check else DrainResult.STORM, f"{storm}{more}")

    def _carry_out(self, decide: Callable[[Node | None], DrainDecision]) -> DrainOutcome:
        """Give one order: count, compare, write, count, look."""
        count = self._client.node_updates()
        decision = decide(self._read())  # nothing may come between this read and the write
        if not decision.writes:
            return DrainOutcome(self._node, _RESULTS[decision.action], decision.why)
        self._order(decision)
        alone = came_alone(count, count_with_ours(self._client.node_updates, count, self._w._sleep))
        after = self._after = self._look()
        if after is None or not after.state.known:
            return DrainOutcome(self._node, DrainResult.UNKNOWN, "the order was given; the node cannot be read now")
        as_ordered = after.state.drain == (decision.action is not Action.UNDRAIN)
        if not as_ordered or (decision.reason and after.reason != decision.reason):
            return DrainOutcome(self._node, DrainResult.OVERTAKEN, f"now {after.state}: {after.reason or 'no reason'}")
        if not alone and not self._guard.only_others_were_drained(self._orders):
            self._disown(decision, after)
            why = "another order came at the same moment: look before you resume it"
            return DrainOutcome(self._node, DrainResult.CONTESTED, why)
        was = self._before.state if self._before is not None else ""
        why = f"was {was}; reason: {decision.reason}" if decision.action is Action.DRAIN else decision.why
        return DrainOutcome(self._node, _RESULTS[decision.action], why)

    def _order(self, decision: DrainDecision) -> None:
        self._written = decision.reason
        self._orders += 1
        if decision.action is Action.DRAIN:
            self._client.orders.drain([self._node], decision.reason)
        elif decision.action is Action.REWORD:
            self._client.orders.reword([self._node], decision.reason)
        else:
            self._client.orders.undrain([self._node])

    def _disown(self, decision: DrainDecision, seen: Node) -> None:
        """Leave the node drained, for a reason without owner, unless another order has changed that since."""
        now = self._look()
        if now is None:
            return
        if decision.action is Action.UNDRAIN:
            if not now.state.drain:  # even if its state has changed: a node that was DOWN may have come back by itself
                self._client.orders.drain([self._node], disowned_reason("its drain was ended"))
        elif (now.state.drain, now.reason) == (seen.state.drain, seen.reason):
            self._client.orders.reword([self._node], disowned_reason(decision.reason.removeprefix(PREFIX)))
        self._after = self._look()

    def _read(self) -> Node | None:
        self._before = self._look()
        return self._before

    def _look(self) -> Node | None:
        return next(iter(self._client.nodes([self._node])), None)

    def _not_written(self, decision: DrainDecision) -> DrainOutcome:
        return self._outcome(_RESULTS[decision.action], decision.why)

    def _outcome(self, result: DrainResult, why: str, would_write: str = "") -> DrainOutcome:
        if result is not DrainResult.NOTHING:  # a healthy node that is checked every minute is no news
            self._record("outcome", result, why, self._written or would_write)
        return DrainOutcome(self._node, result, why)

    def _failed(self, error: SlurmError, result: DrainResult) -> DrainOutcome:
        unanswered = isinstance(error, Unanswered)
        ordered = "an order was given, whether it was carried out is not known: " if self._orders else ""
        outcome = self._outcome(DrainResult.UNKNOWN if unanswered else result, f"{ordered}{error}")
        return replace(outcome, unanswered=unanswered)

    def _record(self, step: str, result: str, why: str, reason: str) -> None:
        before, after = self._before, self._after
        self._w._audit.record(
            msgspec.structs.replace(
                self._entry,
                step=step,
                result=result,
                why=why,
                state_before=str(before.state) if before else "",
                reason_before=before.reason if before else "",
                by_before=before.reason_by if before else "",
                reason_written=reason,
                state_after=str(after.state) if after else "",
                reason_after=after.reason if after else "",
            )
        )
