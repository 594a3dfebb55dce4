"""What the node daemon asks of whoever drains, and when: slurmctld serves thousands of nodes, and is not asked at every
turn. A drain is asked for when it is new, and each minute again; ended when its check has passed often enough."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.prolog_epilog.check import Result, Verdict
from resilio_hpc.prolog_epilog.drains import Drainer, Order, carry_out, orders
from resilio_hpc.prolog_epilog.examination import withheld

AGAIN_S = 60.0
LOOK_S = 600.0
"""How often to ask whether the node is drained by us, while it is not believed to be."""


@dataclass
class NodeDrains:
    """``said`` gets a line for what changed."""

    drainer: Drainer
    said: Callable[[str], None]
    _ordered: Sequence[Order] = ()
    _ordered_s: float = -math.inf
    _withheld: str = ""
    _passes: Counter[str] = field(default_factory=Counter)
    _held: frozenset[str] = frozenset()
    _asked_s: float | None = None
    _trouble: str = ""

    def looked(self, results: Iterable[Result]) -> None:
        """Count the passes in a row; what could not be read is none."""
        for result in results:
            self._passes[result.check] = self._passes[result.check] + 1 if result.status == "pass" else 0

    def turn(self, verdict: Verdict) -> Verdict:
        """Ask for drains and give back; the verdict, which is not to be acted on where a drain was withheld."""
        wanted = orders(verdict)
        new = {order.check for order in wanted} - {order.check for order in self._ordered}
        if wanted and (new or verdict.uptime_s - self._ordered_s >= AGAIN_S):
            carried = carry_out(wanted, self.drainer)
            self._ordered_s = verdict.uptime_s
            self._withheld = next((str(one) for one in carried if one.outcome == "withheld"), "")
            self._held |= {one.order.check for one in carried if one.outcome == "drained"}
            for one in carried:
                if one.order.check in new or one.outcome != "already":
                    self.said(str(one))
        self._ordered = wanted
        self._withheld = self._withheld if wanted else ""
        self._give_back(verdict, {order.check for order in wanted})
        return withheld(verdict, self._withheld) if self._withheld else verdict

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
        except SlurmError as error:
            trouble = f"whether this node's drains may end is not known: {error}"
        if trouble and trouble != self._trouble:
            self.said(trouble)
        self._trouble = trouble
