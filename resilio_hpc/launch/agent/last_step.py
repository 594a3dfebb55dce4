"""Before this node's ranks are ended for a restart: the step that they finished last is saved, if that is possible.

Ranks that can do so are asked, and get some time. Where ranks hold the same tensors one is asked first: all have left
a record of their last boundaries, so its snapshot is enough (``ckpt.replication.lost_ranks``), and the others are asked
where it is not. Which step all nodes have, and whether it is newer than what was saved before, is for the controller to
see.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from resilio_hpc.ckpt.replication import lost_ranks
from resilio_hpc.core import rank_link
from resilio_hpc.core.bounded import begin
from resilio_hpc.core.errors import ResilioError
from resilio_hpc.launch.agent.decisions.node_ranks import NodeRanks
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.local_rank import LocalRank
from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.node_context import NodeContext

ANSWER_S = 1.0  # a rank that is stopped, or holds Python's lock, does not answer
LIMIT_S = 30.0  # for ranks that save, and as much for the snapshots of lost ranks
SOON_S = 0.05  # the agent may stand still for so long
OTHERS_S = 3.0  # for the replicator to see what can be made for another node's ranks
OWN = "a rank is lost, and no other rank is known to hold its tensors"

Made = tuple[int, list[int]]


class LastStepSaves:
    """Has the last finished step saved, once for a round; and ahead of a lease's end, at which there is no time."""

    def __init__(
        self, node: NodeContext, ranks: NodeRanks, tell_rank: Callable[[int, rank_link.AgentMessage], None],
        make_lost: Callable[[int, Callable[[], None]], None], clock: Callable[[], float] = time.monotonic,
        is_stopped: Callable[[int], bool] = lambda _: False,
        look: Callable[[LocalRound], Future[Made]] | None = None,
    ) -> None:  # fmt: skip
        """``ranks`` hears when it is over; ``tell_rank``: sends a message to a local rank.

        ``make_lost``: sees which snapshots of a step can be made for the ranks of another node, then calls back.
        ``is_stopped``: whether a local rank's process is. ``look``: for what this node's ranks can have, by
        ``lost_ranks.whole_step`` as a rule.
        """
        self._node = node
        self._ranks = ranks
        self._tell_rank = tell_rank
        self._make_lost = make_lost
        self._clock = clock
        self._is_stopped = is_stopped
        self._look = look or self._in_a_thread
        self._local: LocalRound | None = None
        self._done: LocalRound | None = None  # for which it was tried
        self._told: LocalRound | None = None  # that it does not help
        self._is_ahead = False  # the round may go on
        self._begun = self._since = 0.0  # the first question, the last one
        self._making: Future[Made] | None = None
        self._found: Made | None = None  # what this node's ranks have
        self._asked: set[int] = set()  # local ranks
        self._answering: set[int] = set()  # those of them that were asked last
        self._asked_at = 0.0  # for the ranks of the other node

    def begin(self, local: LocalRound, worth: m.LastStep, ahead: bool = False) -> bool:
        """Ask ranks to save. Return whether their end has to wait for ``NodeRanks.last_step_saved``.

        ``ahead``: the round may go on, and its end asks again.
        """
        if local is self._local:
            self._is_ahead = self._is_ahead and ahead
            return True
        holds = [rank.holds_steps for rank in local.ranks.values() if rank.holds_steps is not None]
        is_worth = worth == "all" or (worth == "shared" and any(one.shared for one in holds))
        if local is self._done or not holds:
            return False
        if not is_worth:
            if worth == "shared" and not ahead and local is not self._told:
                self._told = local
                self._record(local, -1, 0, [], OWN)
            return False
        self._local, self._is_ahead, self._asked, self._begun = local, ahead, set(), self._clock()
        able = self._able(local)
        able.sort(key=lambda rank: (not rank.saves_last, rank.has_raised, rank.local_rank), reverse=True)
        # of ranks that have not come equally far, one of each: the other nodes may have only one of these steps
        groups = {(one.group, rank.step): rank for rank in able if (one := rank.holds_steps) is not None and one.shared}
        self._ask(list(groups.values()) or able)
        return True

    def _ask(self, ranks: list[LocalRank]) -> None:
        self._making, self._found, self._since = None, None, self._clock()
        self._answering = {rank.local_rank for rank in ranks}
        for rank in ranks:
            self._asked.add(rank.local_rank)
            self._tell_rank(rank.local_rank, rank_link.SaveLastStep(self._is_ahead))

    def _able(self, local: LocalRound) -> list[LocalRank]:
        """Return the ranks that could save and were not asked yet."""
        return [
            rank for rank in local.ranks.values()
            if rank.holds_steps is not None and not rank.done and rank.local_rank not in self._asked
            and not self._is_stopped(rank.local_rank)
        ]  # fmt: skip

    def _awaited(self, local: LocalRound) -> list[LocalRank]:
        """Return the ranks that may still save."""
        waited = self._clock() - self._since
        return [
            rank for rank in local.ranks.values()
            if rank.local_rank in self._answering and not rank.done and rank.last_saved is None
            and waited < (LIMIT_S if rank.saves_last else ANSWER_S) and not self._is_stopped(rank.local_rank)
        ]  # fmt: skip

    def tick(self) -> None:
        """Go on when ranks have saved, or will not."""
        local = self._local
        if local is None:
            return
        if local is not self._ranks.local:
            self._local = None  # its ranks are being ended without it
        elif self._making is None:
            if not self._awaited(local):
                self._making = self._look(local)
                if self._making.done():
                    self._made(local, self._making)
        elif self._found is not None:
            if self._clock() - self._asked_at > OTHERS_S:
                self._end(local, *self._found, "the replicator does not answer")
        elif self._making.done():
            self._made(local, self._making)
        elif self._clock() - self._since > 2 * LIMIT_S:
            self._end(local, -1, [], "to look for what lost ranks have left took too long")

    def _in_a_thread(self, local: LocalRound) -> Future[Made]:
        """Begin to look for a step that all ranks have. Mostly it is little work, and done on return."""
        directory, ranks = self._node.arena_dir, [rank.rank for rank in local.ranks.values()]
        began_with = -1 if local.restore is None else local.restore.step
        looking = begin(lambda: lost_ranks.whole_step(directory, ranks, local.number, began_with))
        wait([looking], SOON_S)
        return looking

    @staticmethod
    def _saved(local: LocalRound) -> list[rank_link.LastStepSaved]:
        """Return the answers of ranks."""
        return [rank.last_saved for rank in local.ranks.values() if rank.last_saved is not None]

    def _made(self, local: LocalRound, making: Future[Made]) -> None:
        """See whether the partner's ranks, if they are lost, can have the same step."""
        step, why = -1, ""
        made: list[int] = []
        try:
            step, made = making.result(0)
        except (ResilioError, OSError) as error:
            why = f"{type(error).__name__}: {error}"
        saved = [one.step for one in self._saved(local) if one.step >= 0]
        others = self._able(local)
        if others and step not in saved:
            self._ask(others)
            return
        if step < 0 or (saved and step not in saved):  # all have an older one, from before
            if not any(rank.holds_steps is not None and rank.holds_steps.shared for rank in local.ranks.values()):
                self._end(local, -1, [], why or (OWN if len(saved) < len(local.ranks) else ""))
                return
            step, made = max(saved, default=-1), []
            why = why or ("" if step < 0 else "another node may have the lost ranks' part")
        if step < 0:
            self._end(local, -1, [], why)
            return
        self._found, self._asked_at = (step, made), self._clock()
        self._make_lost(step, lambda: self._end(local, step, made, why))

    def _record(
        self, local: LocalRound, step: int, saved: int, made: list[int], why: str, seconds: float = 0.0
    ) -> None:
        self._node.record(
            "last_step", round=local.number, step=step, saved=saved, made=made, of=len(local.ranks),
            seconds=round(seconds, 3), why=why,
        )  # fmt: skip

    def _end(self, local: LocalRound, step: int, made: list[int], error: str) -> None:
        if self._local is not local:
            return
        self._local, self._done = None, None if self._is_ahead else local
        saved = self._saved(local)
        errors = {error, *(one.error for one in saved)} - {""}
        step = step if made or any(one.step == step for one in saved) else -1  # else it was saved before
        done = sum(one.step >= 0 for one in saved)
        self._record(local, step, done, made, "; ".join(sorted(errors)), self._clock() - self._begun)
        for rank in local.ranks.values() if self._is_ahead else ():
            rank.saves_last, rank.last_saved = False, None
        self._ranks.last_step_saved()
