"""One failure and its recovery, from the first sign until all ranks have done a step again. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from resilio_hpc.launch.controller.recovery_policy import RecoveryPlan
from resilio_hpc.launch.controller.repeated_failure import Repeatable, repeatable
from resilio_hpc.launch.protocol.message_parts import Cause, RankFailure
from resilio_hpc.launch.protocol.root_cause import is_consequence, may_be_consequence, origin, place_of

CAUSE_S = 1.0  # seconds: a rank that failed first may end later than its peers, which notice its failure
RANK_KINDS = ("exit", "signal", "early_exit", "restore_failed", "hang")  # failures of a rank itself
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
    hung: bool = False  # the ranks did not go on, and none is to blame
    plan: RecoveryPlan | None = None
    # since when ranks run that report no steps (monotonic): the recovery may be complete
    runs_since: float | None = None
    _told: tuple[int, int, int] = (0, 0, 0)  # failures, lost nodes and restarted agents of the rounds before the last

    @property
    def first_failure(self) -> RankFailure | None:
        """Return the rank failure to blame, if any."""
        return origin(self.failures)

    def cause(self, certain: bool = False) -> Cause | None:
        """Return what ended the last round, if that is known.

        ``certain``: only what cannot follow from a failure whose report is still on its way.
        """
        failures, lost, restarted = self._told
        for node in (*self.lost_nodes[lost:], *self.restarted_agents[restarted:]):
            return Cause(node, -1)
        first = origin(self.failures[failures:])
        if first is None or (certain and may_be_consequence(first)):
            return None
        is_rank = first.kind in RANK_KINDS
        return Cause(first.node, first.rank if is_rank else -1, is_consequence(first), place_of(first.traceback))

    def last_failure(self) -> RankFailure | None:
        """Return the rank failure that ended the last round, if one did."""
        return origin(self.failures[self._told[0] :])

    def round_told(self) -> None:
        """Take note that the next round's ranks start: what fails from now on ends that one."""
        self._told = len(self.failures), len(self.lost_nodes), len(self.restarted_agents)

    def kind(self) -> tuple[str, str]:
        """Return what failed, and on which node ("" where no node failed)."""
        first = self.first_failure
        if self.lost_nodes:
            return "node_lost", self.lost_nodes[0]
        if self.restarted_agents:
            return "agent_lost", self.restarted_agents[0]
        if self.new_controller:
            return "controller_lost", ""
        if first is None and self.hung:
            return "hang", ""
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


def fields_of(failure: RankFailure) -> dict[str, Any]:
    """Return a failure as the ledger has it. ``echo``: it reads like an echo of another rank's end."""
    fields = {name: getattr(failure, name) for name in failure.__struct_fields__ if name != "bad_copy"}
    place = {"place": place_of(failure.traceback)} if failure.traceback else {}
    return {**fields, **place, **({"echo": True} if is_consequence(failure) else {})}
