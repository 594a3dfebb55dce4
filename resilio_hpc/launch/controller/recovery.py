"""One failure with all that belongs to it, from the first sign to the first step of all ranks after it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from resilio_hpc.launch.controller.recovery_policy import RecoveryPlan
from resilio_hpc.launch.controller.repeated_failure import Repeatable, repeatable
from resilio_hpc.launch.protocol.message_parts import RankFailure
from resilio_hpc.launch.protocol.root_cause import may_be_consequence, origin

CAUSE_S = 1.0  # a rank that failed first may take so long to end; its peers hear of it before we do
KINDS = {"signal": "rank_killed", "exit": "rank_exception"}


@dataclass
class Recovery:
    """``began``: Unix seconds of the first sign, for a silent node when it was last heard; ``decided``: when known."""

    began: float
    decided: float
    opened: float  # as ``decided``, monotonic
    at_step: int  # the most steps that any rank had completed, -1 when unknown
    survived: bool = False  # ranks that tell of no steps had run for SURVIVED_S
    failures: list[RankFailure] = field(default_factory=list)
    lost_nodes: list[str] = field(default_factory=list)
    restarted_agents: list[str] = field(default_factory=list)
    new_controller: bool = False
    plan: RecoveryPlan | None = None
    runs_since: float | None = None  # ranks that tell of no steps run since then, monotonic: is it over?

    @property
    def first_failure(self) -> RankFailure | None:
        """The rank failure to blame."""
        return origin(self.failures)

    def kind(self) -> tuple[str, str]:
        """Return what broke, and on which node ("" when it was none)."""
        first = self.first_failure
        if self.lost_nodes:
            return "node_lost", self.lost_nodes[0]
        if self.restarted_agents:
            return "agent_lost", self.restarted_agents[0]
        if self.new_controller:
            return "controller_lost", ""
        return ("slow_start", "") if first is None else (KINDS.get(first.kind, first.kind), first.node)

    def repeatable(self) -> Repeatable | None:
        """Return what would have to come again, as far as the failure is the ranks' own doing."""
        first = self.first_failure
        if first is None or self.lost_nodes or self.restarted_agents or self.new_controller:
            return None
        return repeatable(first, self.at_step, self.survived)

    def repeated(self, before: Repeatable | None) -> RankFailure | None:
        """Return the failure if it is the program's own mistake and also broke the round before.

        Ask when the ranks have stopped: only then is all known that they report.
        """
        now = self.repeatable()
        return self.first_failure if now is not None and before is not None and now.is_again(before) else None

    def awaits_cause(self, now: float) -> bool:
        """Return whether all that is known may be the echo of another rank's end, which may be reported in a moment."""
        first = self.first_failure
        if first is None or self.lost_nodes or self.restarted_agents:
            return False
        return may_be_consequence(first) and now - self.opened < CAUSE_S
