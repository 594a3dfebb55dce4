"""One failure and its recovery, from the first sign until all ranks have done a step again. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

from resilio_hpc.diagnose.cascade.clocks import ClockBounds
from resilio_hpc.diagnose.cascade.death import Death, death_of
from resilio_hpc.diagnose.cascade.verdict import CascadeVerdict, judge
from resilio_hpc.launch.controller.facts.fault_actions import FaultAction, row_of
from resilio_hpc.launch.controller.facts.recovery_policy import RecoveryPlan
from resilio_hpc.launch.controller.facts.repeated_failure import OF_CLASS, Repeatable, repeatable
from resilio_hpc.launch.controller.facts.state import Clock
from resilio_hpc.launch.protocol.failure_class import classify
from resilio_hpc.launch.protocol.message_parts import Cause, RankFailure
from resilio_hpc.launch.protocol.root_cause import as_death, is_consequence, may_be_consequence, place_of

CAUSE_S = 1.0  # seconds: a rank that failed first may end later than its peers, which notice its failure
RANK_KINDS = ("exit", "signal", "early_exit", "restore_failed", "hang", "corruption")  # failures of a rank itself
UNSAID = ("bad_copy", "uncertain_s", "log", "groups")  # in the ledger only where they say something
KINDS = {"signal": "rank_killed", "exit": "rank_exception"}


class Recovery(Struct):
    """A failure with its recovery.

    ``began``: Unix seconds of the first sign, or when a silent node was last heard; ``decided``: when it was known.
    """

    began: float
    decided: float
    opened: float  # monotonic seconds of ``decided``
    at_step: int  # the most steps that any rank had completed, -1 if unknown
    survived: bool = False  # ranks that report no steps had run for SURVIVED_S
    failures: list[RankFailure] = field(default_factory=list)  # with their times on the controller's clock
    lost_nodes: list[str] = field(default_factory=list)
    addresses: dict[str, str] = field(default_factory=dict)  # address → node, of the round that failed
    restarted_agents: list[str] = field(default_factory=list)
    new_controller: bool = False
    hung: bool = False  # the ranks did not go on, and none is to blame
    plan: RecoveryPlan | None = None
    moves: str = ""  # why the node of the rank that failed is left to a spare; "" where it is not
    # since when ranks run that report no steps (monotonic): the recovery may be complete
    runs_since: float | None = None
    _told: tuple[int, int, int] = (0, 0, 0)  # failures, lost nodes and restarted agents of the rounds before the last
    _said: set[RankFailure] = field(default_factory=set)  # the failures as agents said them
    _heard: dict[str, float] = field(default_factory=dict)  # when lost nodes were last heard, Unix seconds
    _deaths: list[Death] = field(default_factory=list)  # of ``failures``
    _judged: dict[tuple[int, int], CascadeVerdict] = field(default_factory=dict)  # of failures from … to …

    @property
    def first_failure(self) -> RankFailure | None:
        """Return the rank failure to blame, if any."""
        return self._origin(0)

    def knows(self, said: RankFailure) -> bool:
        """Return whether an agent has said this before."""
        return said in self._said

    def take(self, failure: RankFailure, said: RankFailure) -> None:
        """Take a failure. ``said``: with the time as its agent said it."""
        self.failures.append(failure)
        self._said.add(said)

    def lose(self, nodes: Sequence[str], heard: float) -> None:
        """Take note of lost nodes, last heard at ``heard`` or later."""
        self.lost_nodes += nodes
        self._heard |= dict.fromkeys(nodes, heard)

    def _origin(self, start: int) -> RankFailure | None:
        verdict = self._verdict(start)
        return self.failures[start + verdict.index] if verdict is not None else None

    def _verdict(self, start: int) -> CascadeVerdict | None:
        """Return the verdict on the ranks' failures from a number on; None without any. Each set is judged once."""
        self._deaths += [as_death(failure) for failure in self.failures[len(self._deaths) :]]
        key = start, len(self._deaths)
        if key not in self._judged and start < len(self._deaths):
            self._judged = {key: judge(self._deaths[start:], self.addresses)}
        return self._judged.get(key)

    def last_origin(self, world_size: int) -> tuple[CascadeVerdict, int] | None:
        """Return what ended the last round, of ranks and nodes, and how many ends are known; None without any."""
        failures, lost, _ = self._told
        self._verdict(0)
        gone = [death_of(-1, node, "node_lost", self._heard.get(node, self.began))
                for node in self.lost_nodes[lost:]]  # fmt: skip
        deaths = [*self._deaths[failures:], *gone]
        return (judge(deaths, self.addresses, world_size), len(deaths)) if deaths else None

    def cause(self, certain: bool = False) -> Cause | None:
        """Return what ended the last round, if that is known.

        ``certain``: only what cannot follow from a failure whose report is still on its way.
        """
        failures, lost, restarted = self._told
        for node in (*self.lost_nodes[lost:], *self.restarted_agents[restarted:]):
            return Cause(node, -1)
        first = self._origin(failures)
        if first is None or (certain and may_be_consequence(first)):
            return None
        is_rank = first.kind in RANK_KINDS
        return Cause(first.node, first.rank if is_rank else -1, is_consequence(first), place_of(first.traceback))

    @property
    def loses_state(self) -> bool:
        """Return whether the state of a rank is lost with what ended the last round: it did not end by itself."""
        failures, lost, restarted = self._told
        by_itself = all(failure.kind in ("exit", "early_exit") for failure in self.failures[failures:])
        return not by_itself or len(self.lost_nodes) > lost or len(self.restarted_agents) > restarted

    def last_failure(self) -> RankFailure | None:
        """Return the rank failure that ended the last round, if one did."""
        return self._origin(self._told[0])

    def round_told(self) -> None:
        """Take note that the next round's ranks start: what fails from now on ends that one."""
        self._told = len(self.failures), len(self.lost_nodes), len(self.restarted_agents)
        self.moves = ""

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
        """Return the mark by which the last round's failure can be recognised when it comes again."""
        first = self.last_failure()
        if first is None or self.lost_nodes or self.restarted_agents or self.new_controller:
            return None
        return repeatable(first, self.at_step, self.survived)

    def moves_from(self, before: Repeatable | None) -> str:
        """Return why a spare should take the node of the last round's failure, "" where the node is not at fault."""
        first = self.last_failure()
        if first is None or self.lost_nodes or self.restarted_agents or first.kind not in OF_CLASS:
            return ""
        if is_consequence(first):
            return ""
        found = classify(first)
        now = repeatable(first, self.at_step, self.survived)
        again = now is not None and now.moves_after(before)
        return found.says if row_of(found).first is FaultAction.MOVE or again else ""

    def traces(self) -> bool:
        """Return whether the next round's communication libraries should write what they do."""
        first = self.last_failure()
        if first is None:  # a hang, or a start that took too long
            return not (self.lost_nodes or self.restarted_agents or self.new_controller)
        return first.kind == "hang" or (first.kind in ("exit", "signal") and row_of(classify(first)).trace)

    def repeated(self, before: Repeatable | None) -> RankFailure | None:
        """Return the failure if it is the program's own mistake and also ended the round before.

        Call it when the ranks have stopped: only then are all their reports in.
        """
        now = self.repeatable()
        return self.last_failure() if now is not None and before is not None and now.is_again(before) else None

    def awaits_cause(self, now: float) -> bool:
        """Return whether the known failures may follow from another rank's, whose report is still on its way."""
        first = self.first_failure
        if first is None or self.lost_nodes or self.restarted_agents:
            return False
        return may_be_consequence(first) and now - self.opened < CAUSE_S


def fields_of(failure: RankFailure) -> dict[str, Any]:
    """Return a failure as the ledger has it. ``echo``: it reads like an echo of another rank's end."""
    fields = {name: getattr(failure, name) for name in failure.__struct_fields__ if name not in UNSAID}
    echo = is_consequence(failure)
    if failure.kind in OF_CLASS and not echo:
        fields["class"] = classify(failure).cause.value
    place = {"place": place_of(failure.traceback)} if failure.traceback else {}
    if failure.uncertain_s >= 0:
        fields["uncertain_s"] = round(failure.uncertain_s, 6)
    fields |= {"log": failure.log} if failure.log else {}
    return {**fields, **place, **({"echo": True} if echo else {})}


def origin_fields(verdict: CascadeVerdict, ends: int) -> dict[str, Any]:
    """Return where a cascade began as the ledger has it. ``ends``: how many ends are known."""
    return {
        "node": verdict.node, "rank": verdict.rank, "primary": verdict.primary, "confidence": verdict.confidence,
        "evidence": verdict.evidence[:1000], "ends": ends,
    }  # fmt: skip


def on_own_clock(failure: RankFailure, of_node: ClockBounds, clock: Clock) -> RankFailure:
    """Return a failure with its time on the controller's clock, as far as that of its node is known."""
    now = clock.monotonic()
    found = of_node.to_local(failure.time, now)
    if found is None:
        return failure
    time = found[0] + clock.unix() - now
    return msgspec.structs.replace(failure, time=time, uncertain_s=min(found[1], 1e9))
