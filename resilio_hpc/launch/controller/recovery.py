"""One failure and its recovery, from the first sign until all ranks have done a step again. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from resilio_hpc.launch.controller.recovery_policy import RecoveryPlan
from resilio_hpc.launch.controller.repeated_failure import Repeatable, repeatable
from resilio_hpc.launch.protocol.message_parts import RankFailure
from resilio_hpc.launch.protocol.root_cause import may_be_consequence, origin

CAUSE_S = 1.0  # seconds: a rank that failed first may end later than its peers, which notice its failure
KINDS = {"signal": "rank_killed", "exit": "rank_exception"}


@dataclass
class Recovery:
    """A failure with its recovery.

    ``began``: Unix seconds of the first sign, or when a silent node was last heard; ``decided``: when it was known.
    """

    began: float
    decided: float
    opened: float  # monotonic seconds of ``decided``
    at_step: int  # the most steps that any rank had completed, -1 if unknown
    survived: bool = False  # ranks that report no steps had run for SURVIVED_S
    failures: list[RankFailure] = field(default_factory=list)
    lost_nodes: list[str] = field(default_factory=list)
    restarted_agents: list[str] = field(default_factory=list)
    new_controller: bool = False
    plan: RecoveryPlan | None = None
    # since when ranks run that report no steps (monotonic): the recovery may be complete
    runs_since: float | None = None

    @property
    def first_failure(self) -> RankFailure | None:
        """Return the rank failure to blame, if any."""
        return origin(self.failures)

    def kind(self) -> tuple[str, str]:
        """Return what failed, and on which node ("" where no node failed)."""
        first = self.first_failure
        if self.lost_nodes:
            return "node_lost", self.lost_nodes[0]
        if self.restarted_agents:
            return "agent_lost", self.restarted_agents[0]
        if self.new_controller:
            return "controller_lost", ""
        return ("slow_start", "") if first is None else (KINDS.get(first.kind, first.kind), first.node)

    def repeatable(self) -> Repeatable | None:
        """Return the mark by which the ranks' own failure can be recognised when it comes again."""
        first = self.first_failure
        if first is None or self.lost_nodes or self.restarted_agents or self.new_controller:
            return None
        return repeatable(first, self.at_step, self.survived)

    def repeated(self, before: Repeatable | None) -> RankFailure | None:
        """Return the failure if it is the program's own mistake and also ended the round before.

        Call it when the ranks have stopped: only then are all their reports in.
        """
        now = self.repeatable()
        return self.first_failure if now is not None and before is not None and now.is_again(before) else None

    def awaits_cause(self, now: float) -> bool:
        """Return whether the known failures may follow from another rank's, whose report is still on its way."""
        first = self.first_failure
        if first is None or self.lost_nodes or self.restarted_agents:
            return False
        return may_be_consequence(first) and now - self.opened < CAUSE_S
