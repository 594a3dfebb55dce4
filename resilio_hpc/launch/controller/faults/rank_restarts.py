"""The controller's part for ranks that start again alone, under ``--restart-policy failed`` (NVX-2). Pure.

The round goes on, and the other ranks are not touched. The controller decides, since the budget of restarts is the
run's, and since it alone sees that all ranks fail together. What a rank cannot do alone is a failure of the round, as
under the other policies (``failures``). So is all that a former controller's ranks do: their round ends with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from resilio_hpc.events.rungs import Rung
from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.controller.facts.fault_actions import FaultAction, row_of
from resilio_hpc.launch.controller.facts.intents import EndRun, Intend
from resilio_hpc.launch.controller.facts.outbox import Outbox
from resilio_hpc.launch.controller.facts.recovery import fields_of, on_own_clock
from resilio_hpc.launch.controller.facts.repeated_failure import (
    OF_CLASS,
    SURVIVED_S,
    Repeatable,
    again_reason,
    repeatable,
)
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.failure_class import classify
from resilio_hpc.launch.protocol.membership import NEVER
from resilio_hpc.launch.protocol.root_cause import is_consequence

TOGETHER_S = 10.0  # ranks that fail within so many seconds may have failed of one cause
LATER_S, LATEST_S = 1.0, 8.0  # a rank that fails soon after its restart waits before the next one, and twice as long
AGAIN_S = 1.0  # after which an order without an answer is repeated
SaidFailure = tuple[m.RankFailure, m.RankFailure]
"""A failure with its time on the controller's clock, and as its agent said it."""
ALONE_KINDS = ("exit", "signal")  # of failures: the rank's process has ended


class RankRestart(Struct):
    """One rank of the round that was started again."""

    node: str
    local_rank: int
    since: float  # monotonic, when it was last started again
    restarts: int = 0
    counted: int = 0  # of these, how many count without progress
    awaited: bool = True  # the order has no answer yet
    soon: int = 0  # how often in a row it failed within TOGETHER_S of its last start
    due: float = 0.0  # monotonic, of the next order
    sent: float = NEVER  # monotonic, when it was last sent


class RankRestarts:
    """Starts ranks again. ``take`` says whether a failure is the rank's alone."""

    def __init__(
        self, run: RunState, out: Outbox, intend: Intend, all_failed: Callable[[Sequence[SaidFailure]], None]
    ) -> None:
        """``all_failed`` takes what has failed where all ranks have: they start again together."""
        self._run = run
        self._out = out
        self._intend = intend
        self._all_failed = all_failed
        self._round = -1
        self._began = run.now()
        self._ranks: dict[int, RankRestart] = {}
        self._said: set[m.RankFailure] = set()  # of this round, as agents said them
        self._together: dict[int, SaidFailure] = {}  # by rank: failures within TOGETHER_S of the first
        self._together_until = self._began
        self._broken: dict[int, Repeatable] = {}  # by rank: its last failure in any round, where it may repeat
        self._told_steps = False

    def take(self, message: m.RankFailed) -> bool:
        """Start a rank that failed again, alone. Return False where its failure ends the round."""
        run, said = self._run, message.failure
        if run.config.restart_policy != "failed" or message.round != run.round or not run.with_ranks:
            return False
        self._follow_round()
        if said in self._said:
            return True  # repeated after a broken connection
        if said.kind not in ALONE_KINDS or run.stopping or run.config.mode != Mode.RECOVER:
            return False
        if not any(member.node == said.node and said.rank in member.ranks for member in run.members):
            return False
        agent = run.agents.get(said.node)
        failure = said if agent is None else on_own_clock(said, agent.clock, run.clock)
        if message.attached or run.attached or run.steps_reported:
            if not self._told_steps:
                self._told_steps = True
                self._tell_all("the ranks report steps, and go back to one step together")
            return False
        counts = self._counts(said.rank)
        if self._ends_round(failure) or (counts and run.without_progress >= run.config.max_without_progress):
            return False
        self._out.record("rank_failed", round=run.round, **fields_of(failure), alone=True)
        self._together[said.rank] = failure, said
        self._said.add(said)
        before, mark = self._broken.get(said.rank), self._mark(failure)
        if mark is not None and before is not None and mark.is_again(before):
            self._intend(EndRun("no_progress", 1, again_reason(failure), failure))
        elif 1 < run.world_size <= len(self._together):
            self._tell_all(
                f"all {run.world_size} ranks failed within {TOGETHER_S:g} s, so they need one another; "
                "the policies for that are all and in-process"
            )
            self._count(self._entry(said), counts)
            self._all_failed([*self._together.values()])
        else:
            self._restart(said, counts)
        self._remember(said.rank, mark)
        return True

    def _follow_round(self) -> None:
        """Forget the ranks of a round that is over."""
        if self._round != self._run.round:
            self._round, self._began = self._run.round, self._run.now()
            self._ranks.clear()
            self._said.clear()
            self._together.clear()

    def _counts(self, rank: int) -> bool:
        """Return whether a failure counts: those of several ranks at once are one."""
        if self._run.now() >= self._together_until:
            self._together.clear()
        if not self._together:
            self._together_until = self._run.now() + TOGETHER_S
        return not self._together or rank in self._together

    def _mark(self, failure: m.RankFailure) -> Repeatable | None:
        known = self._ranks.get(failure.rank)
        lasted_s = self._run.now() - (self._began if known is None else known.since)
        return repeatable(failure, -1, lasted_s >= SURVIVED_S)

    def _remember(self, rank: int, mark: Repeatable | None) -> None:
        if mark is None:
            self._broken.pop(rank, None)
        else:
            self._broken[rank] = mark

    def _ends_round(self, failure: m.RankFailure) -> bool:
        """Return whether the rank's node is at fault, so that a spare should take its place."""
        if failure.kind not in OF_CLASS or is_consequence(failure):
            return False
        if row_of(classify(failure)).first is FaultAction.MOVE:
            return True
        before, mark = self._broken.get(failure.rank), self._mark(failure)
        if mark is None or not mark.moves_after(before):
            return False
        self._run.broke_before = before
        return True

    def _restart(self, said: m.RankFailure, counts: bool) -> None:
        run, entry = self._run, self._entry(said)
        now = run.now()
        entry.soon = entry.soon + 1 if entry.restarts and now - entry.since < TOGETHER_S else 0
        entry.restarts += 1
        entry.due = entry.since = now + (min(LATEST_S, LATER_S * 2 ** (entry.soon - 1)) if entry.soon else 0.0)
        entry.awaited, entry.sent = True, NEVER
        run.restarts += 1
        run.restarted_at = now
        self._count(entry, counts)
        self._out.record(
            "decision", rung=Rung.RESTART_RANK.value, reason=f"rank {said.rank}; the other ranks go on",
            round=run.round, without_progress=run.without_progress, acted=True,
        )  # fmt: skip
        self._order(entry)

    def _entry(self, said: m.RankFailure) -> RankRestart:
        entry = self._ranks.get(said.rank)
        if entry is None:
            entry = self._ranks[said.rank] = RankRestart(said.node, said.local_rank, self._run.now())
        return entry

    def _count(self, entry: RankRestart, counts: bool) -> None:
        self._run.without_progress += counts
        entry.counted += counts

    def _order(self, entry: RankRestart) -> None:
        run, now = self._run, self._run.now()
        is_due = now >= entry.due or run.stopping  # an agent that is stopping its ranks counts this one as ended
        if not is_due or now < entry.sent + AGAIN_S:
            return
        entry.sent = now
        self._out.send(entry.node, m.RestartRank(run.epoch, run.round, entry.local_rank, entry.restarts))

    def _tell_all(self, reason: str) -> None:
        self._out.record("restarts_all", round=self._run.round, reason=reason)

    def restarted(self, message: m.RankRestarted) -> None:
        """Take note that a rank runs again."""
        entry = self._ranks.get(message.rank)
        if entry is None or not entry.awaited or message.restart != entry.restarts or message.node != entry.node:
            return
        entry.awaited = False
        self._out.record(
            "rank_restarted", round=message.round, node=message.node, rank=message.rank, restarts=message.restart,
            seconds=message.seconds,
        )  # fmt: skip

    def tick(self) -> None:
        """Repeat orders without an answer, and forget restarts of ranks that have run for long enough since."""
        run, now = self._run, self._run.now()
        self._follow_round()
        if not run.with_ranks:
            return
        for rank, entry in self._ranks.items():
            if entry.awaited:
                self._order(entry)
            if entry.counted and now - entry.since >= run.config.forgiven_after_s:
                forgiven, entry.counted = min(entry.counted, run.without_progress), 0
                run.without_progress -= forgiven
                if forgiven:
                    self._out.record("forgiven", restarts=forgiven, quiet_s=round(now - entry.since), rank=rank)
