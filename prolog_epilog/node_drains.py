"""What the node daemon asks of whoever drains, and when: slurmctld serves thousands of nodes, and is not asked at every
turn. A drain is asked for when it is new, and each minute again; ended when its check has passed often enough."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.prolog_epilog.check import Result, Verdict
from resilio_hpc.prolog_epilog.drains import Drainer, Order, carry_out, orders
from resilio_hpc.prolog_epilog.examination import only_warned, withheld

AGAIN_S = 60.0
LEAVE_S = 180.0
"""How long prologs may fail after the storm breaker was asked: a few of its turns."""
LOOK_S = 600.0
"""How often to ask whether the node is drained by us, while it is not believed to be."""
STUCK = "processes-stuck"
"""The check that says whether processes hang in the kernel, as where Slurm drained for "Kill task failed"."""


@dataclass
class NodeDrains:
    """``said`` gets a line for what changed."""

    drainer: Drainer
    said: Callable[[str], None]
    _ordered: Sequence[Order] = ()
    _ordered_s: float = -math.inf
    _withheld: str = ""
    _warned: Mapping[str, str] = field(default_factory=dict)
    _passes: Counter[str] = field(default_factory=Counter)
    _held: frozenset[str] = frozenset()
    _asked_s: float | None = None
    _trouble: str = ""
    _leave_s: float = 0.0
    _room_asked_s: float = -math.inf

    def looked(self, results: Iterable[Result]) -> None:
        """Count the passes in a row; what could not be read is none."""
        for result in results:
            self._passes[result.check] = self._passes[result.check] + 1 if result.status == "pass" else 0

    def turn(self, verdict: Verdict) -> Verdict:
        """Ask for drains and give back. The verdict is not to be acted on where a drain was withheld, and a check only
        warns in it that fails on too many nodes at once."""
        wanted = orders(verdict)
        new = {order.check for order in wanted} - {order.check for order in self._ordered}
        # where a check fails everywhere, all nodes ask
        again_s = LOOK_S if all(order.check in self._warned for order in wanted) else AGAIN_S
        if wanted and (new or verdict.uptime_s - self._ordered_s >= again_s):
            carried = carry_out(wanted, self.drainer)
            self._ordered_s = verdict.uptime_s
            self._withheld = next((str(one) for one in carried if one.outcome == "withheld"), "")
            answered = {one.order.check for one in carried if one.outcome != "failed"}
            former = {check: why for check, why in self._warned.items() if check not in answered}
            self._warned = {**former, **{one.order.check: one.why for one in carried if one.outcome == "warned"}}
            acted = [one for one in carried if one.outcome != "warned"]
            down = bool(acted) and all(one.outcome in ("drained", "already") for one in acted)
            self._leave_s = verdict.uptime_s + LEAVE_S if down else 0.0
            self._held |= {one.order.check for one in carried if one.outcome == "drained"}
            for one in carried:
                if one.order.check in new or one.outcome != "already":
                    self.said(str(one))
        self._ordered = wanted
        self._withheld = self._withheld if wanted else ""
        self._give_back(verdict, {order.check for order in wanted})
        self._warned = {check: why for check, why in self._warned.items() if any(one.check == check for one in wanted)}
        verdict = only_warned(verdict, self._warned)
        if all(order.check in self._warned for order in wanted):
            self._ask_for_room(verdict)
        if self._withheld:
            return withheld(verdict, self._withheld)
        return msgspec.structs.replace(verdict, leave_until_s=self._leave_s)

    def _ask_for_room(self, verdict: Verdict) -> None:
        """A prolog that fails for a device, or for this job only, has Slurm drain the node all the same."""
        now = verdict.uptime_s
        if verdict.withheld or verdict.action not in ("evict", "fail"):
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

    def _give_back(self, verdict: Verdict, failing: set[str]) -> None:
        now = verdict.uptime_s
        if self._asked_s is None:  # all nodes of a cluster may be started at once
            self._asked_s = now - LOOK_S + zlib.crc32(verdict.node.encode()) % AGAIN_S
        if now - self._asked_s < (AGAIN_S if self._held else LOOK_S):
            return
        self._asked_s = now
        trouble = ""
        try:
            self._held = self.drainer.held(verdict.node)
            for check in sorted(self._held - failing):
                if self._passes[check] and (said := self.drainer.undrain(verdict.node, check, self._passes[check])):
                    self.said(said)
            if offered := self.drainer.offer(verdict.node, self._passes[STUCK]):
                self.said(offered)
        except SlurmError as error:
            trouble = f"whether this node's drains may end is not known: {error}"
        if trouble and trouble != self._trouble:
            self.said(trouble)
        self._trouble = trouble
