"""The node daemon's requests to the drainer, and their times.

slurmctld serves thousands of nodes, and is not asked at every turn. A drain is asked for when it is new, and each
minute again; it is ended when its check has passed often enough. A drain that another owner ended is not simply made
again: the verdict may be older than the repair. So the checks look first, and until then no prolog may fail.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
from typing_extensions import assert_never

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.prolog_epilog.base.check import NodeVerdict, Result
from resilio_hpc.prolog_epilog.run.cached_verdict import Refusal
from resilio_hpc.prolog_epilog.run.health_run import only_warned, withheld
from resilio_hpc.slurm.client.client import SlurmClient
from resilio_hpc.slurm.client.model import Node
from resilio_hpc.slurm.client.this_node import VARIABLE
from resilio_hpc.slurm.drain.drain import ADOPTED_WITHIN_S, slurms_own
from resilio_hpc.slurm.drain.outcome import DrainOutcome, DrainResult
from resilio_hpc.slurm.drain.reason import Finding, read_reason
from resilio_hpc.slurm.drain.writer import DrainWriter

AGAIN_S = 60.0
LEAVE_S = 180.0
"""How long prologs may fail after the storm breaker was asked: a few of its turns."""
DRAINED_LEAVE_S = 15.0
"""How long they may fail after the node was drained: for jobs that were on their way to it. Not renewed, so that none
fails for an old verdict when the drain is ended."""
LOOK_S = 600.0
"""How often to ask whether the node is drained by us, while it is not believed to be."""
STUCK = "processes-stuck"
"""The check that says whether processes hang in the kernel, as where Slurm drained for "Kill task failed"."""
NO_VERDICT = "no-verdict"
"""What a prolog calls it that found none (``--missing fail``): over once there is one."""
_IN_FORCE = (
    DrainResult.DRAINED, DrainResult.REWORDED, DrainResult.NOTHING, DrainResult.LEFT, DrainResult.OVERTAKEN,
    DrainResult.CONTESTED,
)  # fmt: skip
_WITHHELD = (DrainResult.STORM, DrainResult.WOULD_ACT)  # in observing mode no prolog fails either


class SlurmDrainer:
    """A node's requests to Slurm about itself. ``client``: the writer's, or another that reads the same.

    All methods except ``drain`` raise SlurmError where Slurm does not answer or refuses.
    """

    def __init__(self, client: SlurmClient, writer: DrainWriter) -> None:
        self._client = client
        self._writer = writer
        self._seen: Node | None = None
        self._offered: tuple[str, int | None] | None = None

    def drain(self, node: str, check_id: str, evidence: str) -> DrainOutcome:
        """Drain ``node`` under this package's reason."""
        return self._writer.drain(node, Finding(check_id, evidence))

    def room(self, node: str) -> str:
        """Return "" where the storm breaker would let ``node`` be drained now; else why not."""
        return self._writer.room(node)

    def held(self, node: str) -> frozenset[str]:
        """Return the checks for which this package holds ``node`` drained."""
        found = self._seen = next(iter(self._client.nodes([node])), None)
        if found is None:
            raise SlurmError(f"Slurm knows no node {node}: set {VARIABLE} to this machine's NodeName")
        ours = read_reason(found.reason) if found.state.drain else None
        return frozenset(finding.check for finding in ours or ())

    def drained(self) -> bool:
        """Return whether the node is drained, by this package or another owner, as ``held`` last saw it."""
        return self._seen is not None and self._seen.state.drain

    def adopt(self, node: str, check_id: str, evidence: str, failed_unix_s: float) -> str:
        """Take over a drain that Slurm made since this package's own prolog had failed at that time.

        Return what was done, or "" where there is no such drain.
        """
        outcome = _answered(self._writer.adopt(node, Finding(check_id, evidence), failed_unix_s))
        return f"adopted: {outcome.why}" if outcome.result is DrainResult.REWORDED else ""

    def offer(self, node: str, passes: int) -> str:
        """Return what a person may do about a drain that Slurm made itself and that may have passed.

        "Kill task failed" passes when the processes have ended. Return "" where ``held`` saw none, or it was offered
        before. ``passes``: of the check for stuck processes, in a row.
        """
        seen = self._seen
        row = slurms_own(seen.reason) if seen is not None and seen.state.drain else None
        if seen is None or row is None or not row.offer or self._offered == (seen.reason, seen.reason_time):
            return ""
        outcome = _answered(self._writer.recheck(node, passes))
        if outcome.result is not DrainResult.OFFERED:
            return ""
        self._offered = (seen.reason, seen.reason_time)
        return f"offered: {outcome.why}"

    def undrain(self, node: str, check_id: str, passes: int) -> str:
        """End this package's drain for a check with enough passes in a row; return what was done, or ""."""
        outcome = _answered(self._writer.undrain(node, check_id, passes))
        return "" if outcome.result is DrainResult.NOTHING else f"{outcome.result}: {check_id}: {outcome.why}"


def _answered(outcome: DrainOutcome) -> DrainOutcome:
    """Raise SlurmError where Slurm did not answer, or refused."""
    if outcome.result in (DrainResult.UNKNOWN, DrainResult.REFUSED):
        raise SlurmError(f"{outcome.node}: {outcome.why}")
    return outcome


@dataclass
class NodeDrains:
    """Drains and undrains for verdicts; ``said`` is called with a line for each change.

    ``again``: checks that must look before they drain again. ``_wanted``: evidence by check that asked for a drain at
    the last turn; ``_outcomes``: the outcomes when Slurm last answered.
    """

    drainer: SlurmDrainer
    said: Callable[[str], None]
    again: frozenset[str] = frozenset()
    _wanted: Mapping[str, str] = field(default_factory=dict)
    _ordered_s: float = -math.inf
    _outcomes: dict[str, DrainOutcome] = field(default_factory=dict)
    _passes: Counter[str] = field(default_factory=Counter)
    _held: frozenset[str] = frozenset()
    _asked_s: float | None = None
    _trouble: str = ""
    _leave_s: float = 0.0
    _room_asked_s: float = -math.inf
    _adopted: Refusal | None = None

    def looked(self, results: Iterable[Result]) -> None:
        """Count the passes in a row; an unreadable result is no pass."""
        for result in results:
            self._passes[result.check] = self._passes[result.check] + 1 if result.status == "pass" else 0
        self._passes[NO_VERDICT] += 1
        self.again = frozenset()  # each was looked at now, or is no check of this node

    def turn(self, verdict: NodeVerdict, refusal: Refusal | None = None) -> NodeVerdict:
        """Ask for drains and for their ends.

        The returned verdict is withheld where a drain was withheld; and in it a check that fails on too many nodes at
        once only warns. ``refusal``: the last prolog of this package that failed.
        """
        due = self._due(verdict, self._asking(verdict))
        self._ask(verdict, refusal, now_due=due and bool(self._with(*_IN_FORCE)))
        wanted = self._asking(verdict)
        if self._due(verdict, wanted):
            self._order(verdict, wanted)
        self._wanted = wanted
        self._outcomes = {check: one for check, one in self._outcomes.items() if check in wanted}
        warned = self._with(DrainResult.SHARED)
        verdict = only_warned(verdict, {check: self._outcomes[check].why for check in warned})
        if wanted.keys() == warned:
            self._ask_for_room(verdict)
        if held_back := sorted(self._with(*_WITHHELD)):
            first = self._outcomes[held_back[0]]
            return withheld(verdict, f"{first.result}: {held_back[0]}: {first.why}")
        return msgspec.structs.replace(verdict, leave_until_s=self._leave_s)

    def _order(self, verdict: NodeVerdict, wanted: Mapping[str, str]) -> None:
        """Ask for the drains. A Slurm that does not answer is not asked for the rest: the next verdict asks again."""
        self._ordered_s = verdict.uptime_s
        down: set[str] = set()
        may_fail = True
        for check, evidence in wanted.items():
            outcome = self.drainer.drain(verdict.node, check, evidence)
            said: str | None = outcome.why
            match outcome.result:
                case DrainResult.DRAINED | DrainResult.REWORDED:
                    down.add(check)
                    said = evidence
                case DrainResult.NOTHING | DrainResult.LEFT | DrainResult.OVERTAKEN | DrainResult.CONTESTED:
                    said = evidence if check not in self._wanted else None
                case DrainResult.STORM | DrainResult.WOULD_ACT:
                    may_fail = False
                case DrainResult.SHARED:
                    pass
                case DrainResult.UNKNOWN | DrainResult.REFUSED | DrainResult.OFFERED | DrainResult.UNDRAINED:
                    self.said(f"{outcome.result}: {check}: {outcome.why}")
                    may_fail = False
                    break  # the former outcomes of this drain and of the rest still hold
                case _:
                    assert_never(outcome.result)
            self._outcomes[check] = outcome
            if said is not None:
                self.said(f"{outcome.result}: {check}: {said}")
        # one too many may have been taken back
        self._held = (self._held | down) - self._with(*_WITHHELD, DrainResult.SHARED)
        if not may_fail:
            self._leave_s = 0.0
        elif down:
            self._leave_s = verdict.uptime_s + DRAINED_LEAVE_S

    def _with(self, *results: DrainResult) -> frozenset[str]:
        """Return the checks whose drains had these results."""
        return frozenset(check for check, one in self._outcomes.items() if one.result in results)

    def _asking(self, verdict: NodeVerdict) -> dict[str, str]:
        """Return the evidence for which a verdict asks for a drain, by check, in order."""
        if verdict.withheld:
            return {}
        found = {one.check: one.evidence for one in reversed(verdict.findings) if one.action == "drain"}
        return {check: found[check] for check in sorted(found.keys() - self.again)}

    def _due(self, verdict: NodeVerdict, wanted: Mapping[str, str]) -> bool:
        # where a check fails everywhere, all nodes ask
        again_s = LOOK_S if self._with(DrainResult.SHARED) >= wanted.keys() else AGAIN_S
        is_new = bool(wanted.keys() - self._wanted.keys())
        return bool(wanted) and (is_new or verdict.uptime_s - self._ordered_s >= again_s)

    def _ask_for_room(self, verdict: NodeVerdict) -> None:
        """Ask whether a drain is permitted: Slurm drains a node whose prolog fails, also for one device or one job."""
        now = verdict.uptime_s
        if verdict.withheld or self.again or self._held or verdict.action not in ("evict", "fail"):
            self._leave_s, self._room_asked_s = 0.0, -math.inf
        elif now - self._room_asked_s >= AGAIN_S:
            self._room_asked_s = now
            try:
                why_not = self.drainer.room(verdict.node)
            except SlurmError as error:
                why_not = str(error)
            self._leave_s = 0.0 if why_not else now + LEAVE_S
            if why_not:
                self.said(f"prologs pass, whatever they find: {why_not}")

    def _ask(self, verdict: NodeVerdict, refusal: Refusal | None, *, now_due: bool) -> None:
        """Ask Slurm about this package's drains: some may end, some were ended by others, some lack its reason."""
        now = verdict.uptime_s
        if self._asked_s is None:  # all nodes of a cluster may be started at once
            self._asked_s = now - LOOK_S + zlib.crc32(verdict.node.encode()) % AGAIN_S
        failed = self._unadopted(refusal, now)
        if not now_due and now - self._asked_s < (AGAIN_S if self._held or failed else LOOK_S):
            return
        self._asked_s = now
        trouble = ""
        try:
            held = self.drainer.held(verdict.node)
            if not self.drainer.drained():
                self._ended(self._held | self._with(*_IN_FORCE))
            self._held = held
            self._give_back(verdict)
            if failed is not None:
                self._adopt(verdict, failed)
            if offered := self.drainer.offer(verdict.node, self._passes[STUCK]):
                self.said(offered)
        except SlurmError as error:
            trouble = f"whether this node's drains may end is not known: {error}"
        if trouble and trouble != self._trouble:
            self.said(trouble)
        self._trouble = trouble

    def _ended(self, checks: frozenset[str]) -> None:
        """Handle drains that another owner ended: their checks look before they drain again."""
        if checks:
            self.said(f"the drain was ended by another; looking again: {', '.join(sorted(checks))}")
            self.again |= checks
            self._leave_s = 0.0

    def _give_back(self, verdict: NodeVerdict) -> None:
        failing = {finding.check for finding in verdict.findings if finding.action != "warn"}
        for check in sorted(self._held - failing):
            if self._passes[check] and (said := self.drainer.undrain(verdict.node, check, self._passes[check])):
                self.said(said)
                self._held -= {check}

    def _unadopted(self, refusal: Refusal | None, now: float) -> Refusal | None:
        """Return a failed prolog for which Slurm may have drained the node, without this package's reason yet."""
        recent = refusal is not None and 0 <= now - refusal.uptime_s <= ADOPTED_WITHIN_S
        return refusal if recent and refusal != self._adopted else None

    def _adopt(self, verdict: NodeVerdict, failed: Refusal) -> None:
        evidence = f"prolog of job {failed.job}: {failed.evidence}"
        at_unix_s = verdict.unix_s - (verdict.uptime_s - failed.uptime_s)
        if said := self.drainer.adopt(verdict.node, failed.check, evidence, at_unix_s):
            self._adopted = failed
            self._held |= {failed.check}
            self.said(said)
