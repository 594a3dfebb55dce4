"""States of ranks without a snapshot: another rank's tensors of the same step, and what the rank itself left behind.

Where ranks hold the same tensors: all of them by layout REPLICATED, else those with the same parts of DTensors. Each
rank leaves a record of its last boundaries (``snapshot.boundary_record``), so one rank of a node that saves one of
these is enough for all of them. Nothing is copied: ranks restore, and the saver writes, from the other rank's snapshot.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from functools import lru_cache
from pathlib import Path

from resilio_hpc.ckpt.format.manifest import REPLICATED, RankTable
from resilio_hpc.ckpt.format.own_parts import decode_part, table_group
from resilio_hpc.ckpt.format.pages import PAGE
from resilio_hpc.ckpt.replication.borrowed_state import Borrowed, check_known, locked, table_of
from resilio_hpc.ckpt.replication.replica_copies import checked_table, read_ranges
from resilio_hpc.ckpt.replication.replicas import is_batch_statistic
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.boundary_record import BoundaryRecord, kept_path, read_records, record_path
from resilio_hpc.core.errors import CheckpointError

_RECORD_NAME = re.compile(r"rank(\d{1,9})\.(?:boundary|kept)")

_Moment = tuple[int, int, int]
"""Step, round and world size."""


class _Node:
    """The snapshots and records of a node; each table is read once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.moments: dict[_Moment, dict[int, arena.HeldSnapshot]] = defaultdict(dict)
        for held in arena.scan(directory):
            self.moments[held.step, held.round, held.world_size][held.rank] = held
        self._tables: dict[arena.HeldSnapshot, RankTable] = {}

    def recorded(self) -> set[int]:
        """Return the ranks that have left records."""
        try:
            names = [path.name for path in self._directory.iterdir()]
        except OSError:
            return set()
        return {int(found[1]) for name in names if (found := _RECORD_NAME.fullmatch(name))}

    def first_rank(self, moment: _Moment) -> int:
        """Return the lowest rank of this node then: a node's ranks follow each other."""
        one = next(iter(self.moments[moment].values()))
        return one.rank - one.local_rank

    def borrowed(self, rank: int, moment: _Moment) -> Borrowed | None:
        """Return how a rank of this node gets its state of a moment without a snapshot, as far as the files tell."""
        step, number, world_size = moment
        paths = record_path(self._directory, rank), kept_path(self._directory, rank)
        records = [record for path in paths for record in read_records(path)]
        return self.borrowed_by(rank, record_of(records, step, number, world_size), moment)

    def borrowed_by(self, rank: int, record: BoundaryRecord | None, moment: _Moment) -> Borrowed | None:
        """Do the same with a record of it."""
        holders = self.moments[moment]
        one = holders[min(holders)]
        if record is None or not 0 <= one.local_rank + rank - one.rank < one.local_world_size:
            return None
        holder = holder_of(record, holders.values())
        return None if holder is None else Borrowed(rank, holder, record, self._differing(holder, rank))

    def check(self, one: Borrowed) -> None:
        """Raise CheckpointError where the holder's snapshot is damaged, or does not have all that the rank needs."""
        self._table(one.holder)
        check_known(one, decode_part(one.record.part))

    def is_good(self, one: Borrowed) -> bool:
        """Return whether that is not so."""
        try:
            self.check(one)
        except (CheckpointError, OSError):
            return False
        return True

    def _table(self, held: arena.HeldSnapshot) -> RankTable:
        if held not in self._tables:
            file = locked(held)
            try:
                self._tables[held] = table_of(file, held)[1]
            finally:
                os.close(file)
        return self._tables[held]

    def _differing(self, holder: arena.HeldSnapshot, rank: int) -> set[str]:
        """Return which tensors of a rank were others than the holder's when both were saved last."""
        both = (ranks for _, ranks in sorted(self.moments.items(), reverse=True) if {rank, holder.rank} <= ranks.keys())
        found = next((ranks for ranks in both if ranks[rank].step != holder.step), None)
        if found is None or found[rank].world_size != holder.world_size:
            return set()
        pairs = zip(self._table(found[rank]).tensors, self._table(found[holder.rank]).tensors, strict=False)
        return {
            mine.path for mine, its in pairs
            if (mine.path, mine.checksums) != (its.path, its.checksums) and not is_batch_statistic(mine.path)
        }  # fmt: skip


def whole_step(
    directory: Path, ranks: Collection[int], round_number: int, began_with: int = -1
) -> tuple[int, list[int]]:
    """Return the newest step of which some of ``ranks`` have a snapshot, taken in this round, and all others a record.

    And the ranks without a snapshot; -1 where there is no such step. ``began_with``: a step that the round went on
    from, whose snapshots are of an earlier one. Raises CheckpointError, OSError.
    """
    node = _Node(directory)
    for moment in sorted(node.moments, reverse=True):
        step, number, _ = moment
        missing = sorted(set(ranks) - node.moments[moment].keys())
        if (number != round_number and step != began_with) or len(missing) == len(set(ranks)):
            continue
        found = [one for rank in missing if (one := node.borrowed(rank, moment)) is not None]
        if len(found) == len(missing):
            for one in found:
                node.check(one)
            return step, missing
    return -1, []


def lent(directory: Path) -> list[Borrowed]:
    """Return the states that ranks of this node can restore without a snapshot of their own."""
    node, found = _Node(directory), []
    own = {(held.rank, held.step) for holders in node.moments.values() for held in holders.values()}
    for moment in node.moments:
        for rank in sorted(rank for rank in node.recorded() if (rank, moment[0]) not in own):
            one = node.borrowed(rank, moment)
            if one is not None and node.is_good(one):
                found.append(one)
    return found


def borrowed(directory: Path, rank: int, step: int, world_size: int) -> Borrowed | None:
    """Return how a rank gets its state of a step without a snapshot of its own; None where it cannot."""
    node = _Node(directory)
    found = (node.borrowed(rank, moment) for moment in _moments_of(node, step, world_size))
    return next((one for one in found if one is not None and node.is_good(one)), None)


def of_another_world(directory: Path, local_rank: int, step: int) -> Borrowed | arena.HeldSnapshot | None:
    """Return the state of the rank that had this place on the node when all ranks had the same tensors.

    For a world of another size than that rank's, in which it has another number, or none.
    """
    node = _Node(directory)
    for moment in _moments_of(node, step):
        holders = node.moments[moment]
        rank = node.first_rank(moment) + local_rank
        if rank in holders:
            found: Borrowed | arena.HeldSnapshot | None = holders[rank]
        else:
            borrowed_one = node.borrowed(rank, moment)
            found = borrowed_one if borrowed_one is not None and node.is_good(borrowed_one) else None
        if found is not None and holders[min(holders)].layout == REPLICATED:
            return found
    return None


def record_at(directory: Path, local_rank: int, step: int, part: bytes) -> tuple[int, BoundaryRecord] | None:
    """Return the record of a rank that has no snapshot of a step, which others of its node have; None: it needs none.

    And its number then. ``part``: what is its own, as it was recorded.
    """
    node = _Node(directory)
    moments = _moments_of(node, step)
    if not moments:
        return None
    _, number, world_size = moments[0]
    rank = node.first_rank(moments[0]) + local_rank
    has_own = rank in node.moments[moments[0]]
    return None if has_own else (rank, BoundaryRecord(step, world_size, number, False, part))


def pin(directory: Path, step: int) -> tuple[arena.Pin, list[int]] | None:
    """Keep the snapshots that ranks of this node restore a step from; return the ranks without one of their own, too.

    None, and nothing is kept, where some rank can not. Snapshots of different rounds are never mixed. Raises OSError.
    """
    whole = arena.pin(directory, step)
    if whole is not None:
        return whole, []
    node = _Node(directory)
    for moment in _moments_of(node, step):
        holders, first = node.moments[moment], node.first_rank(moment)
        ranks = range(first, first + holders[min(holders)].local_world_size)
        missing = [rank for rank in ranks if rank not in holders]
        found = [node.borrowed(rank, moment) for rank in missing]
        if all(each is not None and node.is_good(each) for each in found):
            kept = arena.pin_these([holders[rank] for rank in sorted(holders)])
            if kept is not None:
                return kept, missing
    return None


def _moments_of(node: _Node, step: int, world_size: int | None = None) -> list[_Moment]:
    """Return those of a step, and of a world of that size where one is given, those of the newest round first."""
    found = [moment for moment in node.moments if moment[0] == step and world_size in (None, moment[2])]
    return sorted(found, key=lambda moment: moment[1], reverse=True)


def holder_of(record: BoundaryRecord, holders: Iterable[arena.HeldSnapshot]) -> arena.HeldSnapshot | None:
    """Return the first snapshot that has the tensors of the rank that left the record."""
    try:
        group = decode_part(record.part).group
        alike = [held for held in sorted(holders, key=lambda one: one.rank) if _group(held) == group]
        largest = max((held.size_bytes for held in alike), default=0)
        return next((held for held in alike if 2 * held.size_bytes > largest), None)  # a reduced one has a part of them
    except (CheckpointError, OSError):
        return None  # damaged: another step is taken


@lru_cache(64)
def _group(held: arena.HeldSnapshot) -> str | None:
    """Return the name of the ranks that have a snapshot's tensors; None where no others do, or it is gone."""
    header = arena.read_header(held.path)
    if header is None or (header.step, header.sequence) != (held.step, held.sequence):
        return None
    if header.layout == REPLICATED:
        return ""
    data = read_ranges(held, ((header.table_offset, header.table_size),))
    return None if data is None else table_group(checked_table(header, data[PAGE:]))


def record_of(
    records: Collection[BoundaryRecord], step: int, round_number: int, world_size: int
) -> BoundaryRecord | None:
    """Return the record of a step; of two, the one at the boundary."""
    wanted = (step, round_number, world_size)
    found = [record for record in records if (record.step, record.round, record.world_size) == wanted]
    return max(found, key=lambda record: record.order, default=None)
