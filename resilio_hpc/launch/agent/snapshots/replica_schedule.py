"""When an agent copies what is no replica of its partner's snapshots: at each new step, for little of the time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from resilio_hpc.ckpt.replication.replica_copies import LEAST_BYTES, may_have_replicas
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.message_parts import Partner
from resilio_hpc.launch.workers.local_round import LocalRound

REST = 20  # times as long as a copy takes, until the next one
AGAIN_S = 0.2  # the partner's ranks may be a little behind


class ReplicaOrder(Struct, frozen=True):
    """Whose snapshots to copy in a round, of ``world_size`` ranks."""

    round: int
    partner: Partner
    world_size: int


class ReplicaSchedule:
    """Whether this run has replicas, and whose turn it is. ``used`` False: replica copies are not wanted."""

    def __init__(self, arena_dir: Path, used: bool, clock: Callable[[], float]) -> None:
        self._arena_dir, self._clock = arena_dir, clock
        self.used = used
        self.found: bool | None = None if used else False  # replicas; None: not known yet
        self._order: ReplicaOrder | None = None
        self._next_at = 0.0
        self._is_told = False

    def begin(self) -> None:
        """Begin a life: the next order names the partner again."""
        self._order = None
        self._is_told = False

    def follow(self, message: m.KeepCopies, world_size: int) -> None:
        """Take the controller's order: from now on each new step is copied. It may come before there is any."""
        if self.found is not False:
            self._order = ReplicaOrder(message.round, message.partner, world_size)

    def look(self, local: LocalRound | None) -> bool:
        """Return True once: there are snapshots now, and other ranks may hold the same."""
        if self.found is not None or local is None or local.snapshot_whole < 0 or local.nodes < 2:
            return False
        holds_steps = any(rank.holds_steps is not None for rank in local.ranks.values())
        self.found = may_have_replicas(self._arena_dir, 0 if holds_steps else LEAST_BYTES)  # steps of small states, too
        return self.found

    def begin_fetch(self) -> bool:
        """Take note that ranks of this node get their snapshots from replicas. Return whether they are used."""
        self.found = self.found or self.used
        return self.used

    def due(self, local: LocalRound | None) -> ReplicaOrder | None:
        """Return whose snapshots to copy now: of the newest step that all ranks here have."""
        order = self._order
        if order is None or local is None or self._clock() < self._next_at:
            return None
        return order if local.number == order.round and local.snapshot_whole >= 0 else None

    def over(self, seconds: float) -> None:
        """Rest after a copy that took so long."""
        self._next_at = self._clock() + max(AGAIN_S, REST * seconds)

    def none(self) -> None:
        """Take note that each rank's tensors are its own."""
        self.found, self._order = False, None

    def is_worth_telling(self) -> bool:
        """Return whether to record a copy: of replicas, which are copied at each step, the first one of a life."""
        told, self._is_told = self._is_told, True
        return not (self.used and told)
