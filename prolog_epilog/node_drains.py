"""What the node daemon asks of the drainer, and when: slurmctld serves thousands of nodes, and is not asked at every
turn. A drain is asked for when it is new, and each minute again; ended when its check has passed often enough.

A drain that another ended is not simply made again. What the verdict says may be older than the repair: so the checks
look first, and until then no prolog may fail."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.prolog_epilog.cached_verdict import Refusal
from resilio_hpc.prolog_epilog.check import Result, Verdict
from resilio_hpc.prolog_epilog.drains import Carried, Drainer, Order, Outcome, carry_out, orders
from resilio_hpc.prolog_epilog.examination import only_warned, withheld
from resilio_hpc.slurm.drain.drain import ADOPTED_WITHIN_S

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


@dataclass
class NodeDrains:
    """``said`` gets a line for what changed; ``again``: checks that are to look before they drain again.

    ``_answers``: by check that asks for a drain, what became of it when Slurm last answered."""

    drainer: Drainer
    said: Callable[[str], None]
    again: frozenset[str] = frozenset()
    _ordered: Sequence[Order] = ()
    _ordered_s: float = -math.inf
    _answers: Mapping[str, Carried] = field(default_factory=dict)
    _passes: Counter[str] = field(default_factory=Counter)
    _held: frozenset[str] = frozenset()
    _asked_s: float | None = None
    _trouble: str = ""
    _leave_s: float = 0.0
    _room_asked_s: float = -math.inf
    _adopted: Refusal | None = None

    def looked(self, results: Iterable[Result]) -> None:
        """Count the passes in a row; what could not be read is none."""
        for result in results:
            self._passes[result.check] = self._passes[result.check] + 1 if result.status == "pass" else 0
        self._passes[NO_VERDICT] += 1
        self.again = frozenset()  # each of them was looked at now, or is none of this node's

    def turn(self, verdict: Verdict, refusal: Refusal | None = None) -> Verdict:
        """Ask for drains and give back. The verdict is not to be acted on where a drain was withheld, and a check only
        warns in it that fails on too many nodes at once.

        ``refusal``: the last prolog of ours that failed."""
        due = self._due(verdict, self._wanted(verdict))
        self._ask(verdict, refusal, now_due=due and bool(self._with("drained", "already")))
        wanted = self._wanted(verdict)
        if self._due(verdict, wanted):
            self._order(verdict, wanted)
        self._ordered = wanted
        asking = {order.check for order in wanted}
        self._answers = {check: one for check, one in self._answers.items() if check in asking}
        warned = self._with("warned")
        verdict = only_warned(verdict, {check: self._answers[check].why for check in warned})
        if asking == warned:
            self._ask_for_room(verdict)
        if held_back := sorted(self._with("withheld")):
            return withheld(verdict, str(self._answers[held_back[0]]))
        return msgspec.structs.replace(verdict, leave_until_s=self._leave_s)

    def _order(self, verdict: Verdict, wanted: Sequence[Order]) -> None:
        new = self._new(wanted)
        carried = carry_out(wanted, self.drainer)
        self._ordered_s = verdict.uptime_s
        for one in carried:
            if one.order.check in new or one.outcome != "already":
                self.said(str(one))
        self._answers = {**self._answers, **{one.order.check: one for one in carried if one.outcome != "failed"}}
        down = {one.order.check for one in carried if one.outcome == "drained"}
        self._held = (self._held | down) - self._with("withheld", "warned")  # one too many may have been taken back
        outcomes = {one.outcome for one in carried} - {"warned"}
        if not outcomes <= {"drained", "already"}:
            self._leave_s = 0.0
        elif down:
            self._leave_s = verdict.uptime_s + DRAINED_LEAVE_S

    def _with(self, *outcomes: Outcome) -> frozenset[str]:
        """The checks whose drain came to this."""
        return frozenset(check for check, one in self._answers.items() if one.outcome in outcomes)

    def _wanted(self, verdict: Verdict) -> list[Order]:
        return [order for order in orders(verdict) if order.check not in self.again]

    def _new(self, wanted: Sequence[Order]) -> set[str]:
        return {order.check for order in wanted} - {order.check for order in self._ordered}

    def _due(self, verdict: Verdict, wanted: Sequence[Order]) -> bool:
        # where a check fails everywhere, all nodes ask
        again_s = LOOK_S if self._with("warned").issuperset(order.check for order in wanted) else AGAIN_S
        return bool(wanted) and (bool(self._new(wanted)) or verdict.uptime_s - self._ordered_s >= again_s)

    def _ask_for_room(self, verdict: Verdict) -> None:
        """A prolog that fails for a device, or for this job only, has Slurm drain the node all the same."""
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

    def _ask(self, verdict: Verdict, refusal: Refusal | None, *, now_due: bool) -> None:
        """What Slurm says of our drains: some may end, some were ended by others, some are ours without our name."""
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
                self._ended(self._held | self._with("drained", "already"))
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
        """By another: the checks look before they drain again."""
        if checks:
            self.said(f"the drain was ended by another; looking again: {', '.join(sorted(checks))}")
            self.again |= checks
            self._leave_s = 0.0

    def _give_back(self, verdict: Verdict) -> None:
        failing = {finding.check for finding in verdict.findings if finding.action != "warn"}
        for check in sorted(self._held - failing):
            if self._passes[check] and (said := self.drainer.undrain(verdict.node, check, self._passes[check])):
                self.said(said)
                self._held -= {check}

    def _unadopted(self, refusal: Refusal | None, now: float) -> Refusal | None:
        """One that Slurm may have drained the node for, which does not yet bear our name."""
        recent = refusal is not None and 0 <= now - refusal.uptime_s <= ADOPTED_WITHIN_S
        return refusal if recent and refusal != self._adopted else None

    def _adopt(self, verdict: Verdict, failed: Refusal) -> None:
        evidence = f"prolog of job {failed.job}: {failed.evidence}"
        at_unix_s = verdict.unix_s - (verdict.uptime_s - failed.uptime_s)
        if said := self.drainer.adopt(verdict.node, failed.check, evidence, at_unix_s):
            self._adopted = failed
            self._held |= {failed.check}
            self.said(said)
