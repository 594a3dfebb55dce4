"""Snapshots of ranks that were lost: made of another rank's snapshot of the same step, and of what they left behind.

For layout REPLICATED, where ranks hold the same tensors. A rank that is killed leaves a record of its last boundaries
(``snapshot.boundary_record``); a rank that goes on saves its state of one of them.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from resilio_hpc.ckpt.format.manifest import REPLICATED, Extent, RankTable
from resilio_hpc.ckpt.format.own_parts import decode_part, filled, with_own
from resilio_hpc.ckpt.format.pages import PAGE
from resilio_hpc.ckpt.format.whole_snapshot import Header
from resilio_hpc.ckpt.replication.replica_copies import CopyPart, ReplicaCopy, checked_table, owned
from resilio_hpc.ckpt.replication.replicas import is_batch_statistic
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.boundary_record import BoundaryRecord, read_records, record_path
from resilio_hpc.core.bounded import Permit
from resilio_hpc.core.errors import CheckpointError
from resilio_hpc.native import copy_blocks, crc32c, map_shared

_PIECE_BYTES = 8 << 20

Places = dict[int, int]
"""Local rank by rank."""


class _Own(msgspec.Struct, frozen=True):
    """What is a lost rank's own: its header; and its tree, small tensors and table, each with its place.

    They lie behind the holder's bytes.
    """

    header: Header
    parts: tuple[tuple[int, bytes], ...]


def complete(
    directory: Path, spill: Path, ranks: Places, round_number: int, permit: Permit | None = None
) -> tuple[int, list[int]]:
    """Give each of this node's ``ranks`` a snapshot of the newest step that all of them can have, of one round.

    Return that step, and the ranks for which one was made; -1 where not all can have one that ranks have taken in this
    round. ``spill``: a folder on disk, for what does not fit into memory. ``permit``: once it is withdrawn, no snapshot
    becomes whole. Raises CheckpointError, OSError.
    """
    permit = permit or Permit()
    held = of_round(arena.scan(directory), ranks, round_number)
    records = {rank: read_records(record_path(directory, rank)) for rank in ranks}

    def made_of(holder: arena.HeldSnapshot, missing: list[int]) -> dict[int, BoundaryRecord] | None:
        header = arena.read_header(holder.path)
        if header is None or (missing and header.layout != REPLICATED):
            return None
        return records_of(records, missing, holder.step, round_number, header.world_size)

    found = newest_common(held, ranks, made_of)
    if found is None:
        return -1, []
    holder, made = found
    for rank, record in made.items():
        _make(directory, spill, holder, (rank, ranks[rank]), record, permit)
    return holder.step, list(made)


class OfARound(Protocol):
    """A whole snapshot: of which rank and step, and in which round it was taken."""

    @property
    def rank(self) -> int:
        """Return its rank."""

    @property
    def step(self) -> int:
        """Return how many steps were finished."""

    @property
    def round(self) -> int:
        """Return the round."""


Snapshot = TypeVar("Snapshot", bound=OfARound)
Held = dict[int, dict[int, Snapshot]]
"""By step and rank."""


def of_round(snapshots: Iterable[Snapshot], ranks: Collection[int], round_number: int) -> Held[Snapshot]:
    """Return the snapshots of ``ranks`` that were taken in this round."""
    held: Held[Snapshot] = defaultdict(dict)
    for snapshot in snapshots:
        if snapshot.rank in ranks and snapshot.round == round_number:
            held[snapshot.step][snapshot.rank] = snapshot
    return held


def newest_common(
    held: Held[Snapshot], ranks: Collection[int],
    made_of: Callable[[Snapshot, list[int]], dict[int, BoundaryRecord] | None],
) -> tuple[Snapshot, dict[int, BoundaryRecord]] | None:  # fmt: skip
    """Return a snapshot of the newest step that all ``ranks`` can have, and the records for those that lack it.

    ``made_of``: of what the missing ranks' snapshots can be made beside that one; None: not of all. None: no step.
    """
    for step in sorted(held, reverse=True):
        holder = min(held[step].values(), key=lambda one: one.rank)
        made = made_of(holder, sorted(set(ranks) - held[step].keys()))
        if made is not None:
            return holder, made
    return None


def records_of(
    records: Mapping[int, Collection[BoundaryRecord]], ranks: Collection[int], step: int, round_number: int,
    world_size: int,
) -> dict[int, BoundaryRecord] | None:  # fmt: skip
    """Return each rank's record of a step; None where one has none."""
    found = {rank: record_of(records[rank], step, round_number, world_size) for rank in ranks}
    whole = {rank: record for rank, record in found.items() if record is not None}
    return whole if len(whole) == len(found) else None


def record_of(
    records: Collection[BoundaryRecord], step: int, round_number: int, world_size: int
) -> BoundaryRecord | None:
    """Return the record of a step; of two, the one at the boundary."""
    wanted = (step, round_number, world_size)
    found = [record for record in records if (record.step, record.round, record.world_size) == wanted]
    return max(found, key=lambda record: record.order, default=None)


def replica(holder: arena.HeldSnapshot, rank: int, record: BoundaryRecord, known: Collection[str]) -> ReplicaCopy:
    """Return a lost rank's snapshot as a copy that relies on the holder's.

    ``known``: paths of tensors that were not the same on both. Raises CheckpointError, OSError.
    """
    file = _locked(holder)
    try:
        own = _own(file, holder, (rank, 0), record, known)
    finally:
        os.close(file)
    size = holder.size_bytes - PAGE
    parts, kept = [CopyPart(PAGE, size, holder.rank, PAGE)], b""
    for at, data in own.parts:
        parts.append(CopyPart(at, len(data), -1, len(kept)))
        kept += data
    return ReplicaCopy(arena.page(own.header), own.header, parts, kept, [holder])


def _locked(holder: arena.HeldSnapshot) -> int:
    file = arena.lock_snapshot(holder)
    if file is None:
        raise CheckpointError(f"the snapshot of step {holder.step} of rank {holder.rank} is gone")
    return file


def _own(
    file: int, holder: arena.HeldSnapshot, place: tuple[int, int], record: BoundaryRecord, known: Collection[str]
) -> _Own:
    """Return what is a rank's own beside the holder's snapshot.

    ``place``: rank and local rank; ``known``: paths of tensors that were not the same on both.
    """
    header = arena.header_of(file)
    if header is None or record.world_size != header.world_size or header.layout != REPLICATED:
        raise CheckpointError(f"the snapshot of step {holder.step} of rank {holder.rank} is another one")
    source = map_shared(file, holder.size_bytes, False)
    table = checked_table(header, bytes(source[header.table_offset :][: header.table_size]))
    its_tree = bytes(source[table.tree.offset :][: table.tree.size_bytes])
    if crc32c(its_tree) != table.tree.crc32c:
        raise CheckpointError(f"the snapshot of step {holder.step} of rank {holder.rank} is damaged")
    part = decode_part(record.part)
    if others := set(known) - {tensor.path for tensor in part.tensors}:
        raise CheckpointError(f"{min(others)} is another tensor on each rank, and not in what the lost rank left")
    tree = filled(part.outline, its_tree)
    tree_at = -(-header.size_bytes // 64) * 64
    tensors_at = -(-(tree_at + len(tree)) // 64) * 64
    records, tensors = with_own(table, part, tensors_at)
    extent = Extent(tree_at, len(tree), crc32c(tree))
    data = msgspec.json.encode(RankTable(extent, tuple(records)))
    table_at = -(-(tensors_at + len(tensors)) // 64) * 64
    rank, local_rank = place
    mine = replace(header, rank=rank, local_rank=local_rank, size_bytes=table_at + len(data))
    mine = replace(mine, table_offset=table_at, table_size=len(data), table_crc32c=crc32c(data))
    parts = ((tree_at, tree), (tensors_at, tensors), (table_at, data))
    return _Own(mine, tuple(part for part in parts if part[1]))


def _make(
    directory: Path, spill: Path, holder: arena.HeldSnapshot, place: tuple[int, int], record: BoundaryRecord,
    permit: Permit,
) -> None:  # fmt: skip
    """Make a rank's snapshot in its arena: the holder's tensors, and the rank's own tree."""
    known = _differing(directory, holder, place[0])
    file = _locked(holder)
    try:
        own = _own(file, holder, place, record, known)
        header = own.header
        owner = Owner(
            *place, header.world_size, header.local_world_size, header.round, header.layout, header.run_id
        )  # fmt: skip
        pair = ArenaPair(directory, owner, spill)
        try:
            _fill(pair, own, map_shared(file, holder.size_bytes, False), permit)
        finally:
            pair.close()
    finally:
        os.close(file)


def _differing(directory: Path, holder: arena.HeldSnapshot, rank: int) -> set[str]:
    """Return which tensors of a rank were others than the holder's when both were saved last."""
    for step in sorted({held.step for held in arena.scan(directory)} - {holder.step}, reverse=True):
        found = {one.held.rank: one.table.tensors for one in owned(directory, step, holder.world_size)}
        if found.keys() >= {rank, holder.rank}:
            pairs = zip(found[rank], found[holder.rank], strict=False)
            return {
                mine.path for mine, its in pairs
                if (mine.path, mine.checksums) != (its.path, its.checksums) and not is_batch_statistic(mine.path)
            }  # fmt: skip
    return set()


def _fill(pair: ArenaPair, own: _Own, source: memoryview, permit: Permit) -> None:
    slot, room, sequence = pair.reserve(own.header.step, own.header.size_bytes, is_last=True)
    try:
        with room:
            for start in range(PAGE, len(source), _PIECE_BYTES):
                copy_blocks(room, [(start, source, start, min(_PIECE_BYTES, len(source) - start))])
            for at, data in own.parts:
                room[at : at + len(data)] = data
    except BaseException:
        pair.abandon(slot)
        raise
    if not permit.use(lambda: pair.finish(slot, replace(own.header, sequence=sequence))):
        pair.abandon(slot)
