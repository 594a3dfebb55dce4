"""Records of ranks' boundaries in another node's memory: where it has replicas of a lost node, that costs one step.

A node takes the records of its partner's ranks as they are made. When the partner is lost and this node's ranks have
saved the step that they finished last, each lost rank's snapshot is made of theirs and of its record (``lost_ranks``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from resilio_hpc.ckpt.replication import borrowed_state, lost_ranks
from resilio_hpc.ckpt.replication.borrowed_state import Borrowed
from resilio_hpc.ckpt.replication.caller import SnapshotCaller
from resilio_hpc.ckpt.replication.messages import Follow, NewRecords, RankBoundary, WantRecords, asking, giving
from resilio_hpc.ckpt.replication.replica_copies import ReplicaCopies
from resilio_hpc.ckpt.replication.replicas import is_batch_statistic
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.boundary_record import BoundaryRecord, Stamp, read_records, record_path
from resilio_hpc.core import wire
from resilio_hpc.core.directory_watch import DirectoryWatch
from resilio_hpc.core.errors import CheckpointError, WireError
from resilio_hpc.core.standard_streams import say

KEPT = 4  # of each rank: the last boundaries, and what was recorded before their optimizer steps
MOST_BYTES = 8 << 20  # of one answer
LOOK_S = 0.05  # between two looks at the files of ranks, where the kernel does not tell of changes
_SILENT_S = 5.0  # a question is asked again
_REST_S = 0.5  # after an error
_LOOK_MS = 100


class _Follower:
    """A caller that waits for new records. ``known``: those that it got."""

    def __init__(self) -> None:
        self.ranks: tuple[int, ...] = ()
        self.waits = False
        self.known: dict[int, set[Stamp]] = {}


class RecordFeed:
    """Gives the records of this node's ranks to those that follow them."""

    def __init__(self, arenas: Path) -> None:
        self._arenas = arenas
        self._followers: dict[bytes, _Follower] = {}
        self._watch = DirectoryWatch(arenas)
        self._is_asked = False

    @property
    def fd(self) -> int | None:
        """Return a descriptor that can be read when there may be something new."""
        return self._watch.fd

    @property
    def wait_s(self) -> float | None:
        """Return after how many seconds to look again; None: ``fd`` tells."""
        waits = self._watch.fd is None and any(follower.waits for follower in self._followers.values())
        return LOOK_S if waits else None

    def want(self, caller: bytes, message: WantRecords) -> None:
        """Take a question."""
        follower = self._followers.setdefault(caller, _Follower())
        follower.ranks, follower.waits = message.ranks, True
        self._is_asked = True

    def release(self, caller: bytes) -> None:
        """Forget a caller."""
        self._followers.pop(caller, None)

    def due(self) -> list[tuple[bytes, NewRecords]]:
        """Return the answers to those for whom there is something new."""
        changed = self._watch.changed()
        if not (changed or self._is_asked):
            return []
        self._is_asked = False
        found = []
        for caller, follower in self._followers.items():
            records = self._new(follower) if follower.waits else ()
            if records:
                follower.waits = False
                found.append((caller, NewRecords(records)))
        return found

    def _new(self, follower: _Follower) -> tuple[RankBoundary, ...]:
        found: list[RankBoundary] = []
        size = 0
        for rank in follower.ranks:
            known = follower.known.setdefault(rank, set())
            for record in read_records(record_path(self._arenas, rank), known):
                size += len(record.part)
                if size <= MOST_BYTES:
                    found.append(RankBoundary(rank, record))
                    known.add(record.stamp)
            newest = max((stamp[:2] for stamp in known), default=(0, 0))
            follower.known[rank] = {stamp for stamp in known if stamp[0] == newest[0] and stamp[1] >= newest[1] - KEPT}
        return tuple(found)


class PartnerRecords:
    """The records of another node's ranks, and the snapshots that can be made of them. For use from any thread."""

    def __init__(self, context: zmq.Context[Any], keys: wire.Keys, arenas: Path, replicas: ReplicaCopies) -> None:
        """``arenas``: this node's own snapshots; ``replicas``: copies, which tell what of another rank is its own."""
        self._context, self._keys, self._arenas, self._replicas = context, keys, arenas, replicas
        self._lock = threading.Lock()
        self._records: dict[int, list[BoundaryRecord]] = {}
        self._order = Follow("", [])

    def follow(self, order: Follow) -> None:
        """Take the records of other ranks from now on; what is known of them stays."""
        with self._lock:
            if order == self._order:
                return
            self._order = order
            self._records = {rank: records for rank, records in self._records.items() if rank in order.ranks}
        if order.endpoint:
            threading.Thread(target=self._follow, args=(order,), name="resilio-records", daemon=True).start()

    def _follow(self, order: Follow) -> None:
        caller = SnapshotCaller(self._context, self._keys, order.endpoint, _SILENT_S, lambda: order is self._order)
        while order is self._order:
            try:
                with caller.asked() as asked:
                    while order is self._order:
                        self._ask(asked, order)
            except (WireError, OSError, zmq.ZMQError):
                time.sleep(_REST_S)

    def _ask(self, asked: zmq.Socket[bytes], order: Follow) -> None:
        """Ask for new records, and take them; steps may be long, so it is asked again only after a while."""
        wire.send(asked, [asking.encode(WantRecords(tuple(order.ranks)))])
        until = time.monotonic() + _SILENT_S
        while order is self._order and time.monotonic() < until:
            if asked.poll(_LOOK_MS):
                found = giving.decode(asked.recv_multipart()[0])
                if isinstance(found, NewRecords):
                    self._take(order, found.records)
                return

    def _take(self, order: Follow, found: Sequence[RankBoundary]) -> None:
        with self._lock:
            for rank, record in ((one.rank, one.record) for one in found if one.rank in order.ranks):
                kept = [*self._records.get(rank, ()), record]
                self._records[rank] = sorted(kept, key=lambda one: one.order)[-KEPT:]

    def make(self, step: int, world_size: int) -> list[int]:
        """Make replica copies of a step for all ranks for which it is possible; return these ranks."""
        holders = [held for held in arena.scan(self._arenas) if (held.step, held.world_size) == (step, world_size)]
        with self._lock:
            ranks = list(self._records) if holders else []
        return [rank for rank in ranks if self._make(rank, holders)]

    def _make(self, rank: int, holders: Sequence[arena.HeldSnapshot]) -> bool:
        with self._lock:
            records = self._records.get(rank, ())
        record = lost_ranks.record_of(records, holders[0].step, holders[0].round, holders[0].world_size)
        holder = None if record is None else lost_ranks.holder_of(record, holders)
        if record is None or holder is None:
            return False
        try:
            own = {path for path in self._replicas.own_paths(rank) if not is_batch_statistic(path)}
            self._replicas.put(borrowed_state.replica(Borrowed(rank, holder, record, own)))
        except (CheckpointError, OSError) as error:
            say(f"no snapshot of rank {rank} of step {holder.step}: {error}")
            return False
        return True
