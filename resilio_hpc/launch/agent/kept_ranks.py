"""Before this node's ranks are ended for a restart: those that can enter the next round as they live leave this one.

A rank that does not enter in time has failed: the others wait for it, and nothing else would end that soon.

A rank that does not leave in time is ended and started again like one that has failed. So are all of the node's ranks
where entering again has not brought a step (NVX-2, NVX-3).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from resilio_hpc.core import rank_link
from resilio_hpc.launch.agent.decisions.node_ranks import NodeRanks
from resilio_hpc.launch.workers.local_rank import LocalRank
from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.node_context import NodeContext

ANSWER_S = 0.5  # a rank that is stopped, or holds Python's lock, does not answer
LEAVE_S = 5.0  # for its collectives to end, and its model's memory and its data loader's workers to go
ENTER_S = 5.0  # a rank says so before it begins anything
MOST_FRUITLESS = 2  # entries that brought no step; then all ranks of the node are ended


class KeptRanks:
    """Has ranks leave their round, once for a round."""

    def __init__(
        self, node: NodeContext, ranks: NodeRanks, tell_rank: Callable[[int, rank_link.AgentMessage], None],
        clock: Callable[[], float] = time.monotonic, is_stopped: Callable[[int], bool] = lambda _: False,
        unix: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """``ranks`` hears which have left; ``tell_rank``: sends a message to a local rank.

        ``is_stopped``: whether a local rank's process is.
        """
        self._node = node
        self._ranks = ranks
        self._tell_rank = tell_rank
        self._clock = clock
        self._is_stopped = is_stopped
        self._unix = unix
        self._local: LocalRound | None = None
        self._done: LocalRound | None = None  # for which it was tried
        self._begun = 0.0
        self._entered: tuple[LocalRound | None, int, float] = None, 0, 0.0  # the round, ranks awaited, since when
        self._fruitless = 0

    def begin(self, local: LocalRound) -> bool:
        """Ask ranks to leave. Return whether the end of the others has to wait for ``NodeRanks.ranks_left``."""
        if local is self._local:
            return True
        if local is self._done or self._node.options.reentry.restart_policy == "all":
            return False
        self._done = local
        is_fruitless = bool(local.kept) and any(rank.first_step_at is None for rank in local.ranks.values())
        self._fruitless = self._fruitless + 1 if is_fruitless else 0
        if self._fruitless >= MOST_FRUITLESS:
            self._fruitless = 0
            return False
        found = [rank for rank in local.ranks.values() if self._may_leave(rank)]
        if not found:
            return False
        self._local, self._begun = local, self._clock()
        for rank in found:
            self._tell_rank(rank.local_rank, rank_link.LeaveRound())
        return True

    @staticmethod
    def _may_leave(rank: LocalRank) -> bool:
        return rank.can_reenter and not rank.done and not rank.may_exit and rank.bad_copy is None

    def _is_awaited(self, rank: LocalRank, waited: float) -> bool:
        limit = LEAVE_S if rank.is_leaving else ANSWER_S
        return not rank.has_left and waited < limit and not self._is_stopped(rank.local_rank)

    def tick(self) -> None:
        """Go on when all ranks that were asked have left, or will not; see that they enter the next round."""
        self._watch_entries()
        local = self._local
        if local is None:
            return
        if local is not self._ranks.local:
            self._local = None  # its ranks are being ended without it
            return
        asked = [rank for rank in local.ranks.values() if self._may_leave(rank)]
        waited = self._clock() - self._begun
        if not any(self._is_awaited(rank, waited) for rank in asked):
            self._local = None
            kept = frozenset(rank.local_rank for rank in asked if rank.has_left)
            self._node.record(
                "ranks_left", round=local.number, kept=len(kept), of=len(local.ranks), seconds=round(waited, 3),
                others=sorted(local.ranks[rank.local_rank].rank for rank in asked if not rank.has_left),
            )  # fmt: skip
            self._ranks.ranks_left(kept)

    def _watch_entries(self) -> None:
        local, now = self._ranks.local, self._clock()
        if local is None or not local.kept:
            return
        if self._entered[0] is not local or self._entered[1] != local.kept:
            self._entered = local, local.kept, now
        if now - self._entered[2] < ENTER_S or local.failed:
            return
        for rank in local.ranks.values():
            if rank.is_kept and not rank.attached and not rank.done and not local.failed:
                local.failed = True  # once for a round
                self._ranks.spawn_failed(
                    rank.local_rank, f"it has not entered the round in {ENTER_S:g} s", self._unix()
                )
