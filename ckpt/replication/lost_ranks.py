"""States of ranks without a snapshot: another rank's tensors of the same step, and what the rank itself left behind.

Where ranks hold the same tensors: all of them by layout REPLICATED, else those with the same parts of DTensors. Each
rank leaves a record of its last boundaries (``snapshot.boundary_record``), so one rank of a node that saves one of
these is enough for all of them. Nothing is copied until a rank restores, from the other rank's snapshot.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from resilio_hpc.ckpt.format.manifest import REPLICATED, Extent, RankTable
from resilio_hpc.ckpt.format.own_parts import decode_part, filled, table_group, with_own
from resilio_hpc.ckpt.format.pages import PAGE
from resilio_hpc.ckpt.format.whole_snapshot import Header
from resilio_hpc.ckpt.replication.replica_copies import CopyPart, ReplicaCopy, checked_table, owned, read_ranges
from resilio_hpc.ckpt.replication.replicas import is_batch_statistic
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair
from resilio_hpc.ckpt.snapshot.boundary_record import BoundaryRecord, read_records, record_path
from resilio_hpc.core.errors import CheckpointError
from resilio_hpc.native import copy_blocks, crc32c, map_shared

_PIECE_BYTES = 8 << 20
_RECORD_NAME = re.compile(r"rank(\d{1,9})\.boundary")

_Moment = tuple[int, int, int]
"""Step, round and world size."""


class Borrowed(NamedTuple):
    """The state of a rank that has no snapshot of a step: the holder's tensors, and the rank's record.

    ``known``: paths of tensors that were not the same on both.
    """

    rank: int
    holder: arena.HeldSnapshot
    record: BoundaryRecord
    known: Collection[str] = ()

    @property
    def local_rank(self) -> int:
        """Return the rank's place on its node: a node's ranks follow each other."""
        return (self.holder.local_rank + self.rank - self.holder.rank) % self.holder.local_world_size


class Own(msgspec.Struct, frozen=True):
    """What is a rank's own: its header; and its tree, small tensors and table, each with its place.

    They lie behind the holder's bytes.
    """

    header: Header
    table: RankTable
    tree: bytes
    parts: tuple[tuple[int, bytes], ...]


def whole_step(directory: Path, ranks: Collection[int], round_number: int) -> tuple[int, list[int]]:
    """Return the newest step of which some of ``ranks`` have a snapshot, taken in this round, and all others a record.

    And the ranks without a snapshot; -1 where there is no such step. Raises CheckpointError, OSError.
    """
    moments = _moments(directory)
    for moment in sorted(moments, reverse=True):
        step, number, _ = moment
        there = moments[moment].keys() & set(ranks)
        missing = sorted(set(ranks) - there)
        if number != round_number or not there:
            continue
        found = [_borrowed(directory, rank, moments[moment]) for rank in missing]
        if all(one is not None for one in found):
            for one in found:
                if one is not None:
                    own_of(one)
            return step, missing
    return -1, []


def lent(directory: Path) -> list[Borrowed]:
    """Return the states that ranks of this node can restore without a snapshot of their own."""
    moments, found = _moments(directory), []
    own = {(held.rank, held.step) for holders in moments.values() for held in holders.values()}
    for (step, _, _), holders in moments.items():
        for rank in sorted(rank for rank in _recorded(directory) if (rank, step) not in own):
            one = _borrowed(directory, rank, holders)
            if one is not None and _is_good(one):
                found.append(one)
    return found


def borrowed(directory: Path, rank: int, step: int, world_size: int) -> Borrowed | None:
    """Return how a rank gets its state of a step without a snapshot of its own; None where it cannot."""
    for (its_step, _, world), holders in sorted(_moments(directory).items(), reverse=True):
        if (its_step, world) == (step, world_size):
            one = _borrowed(directory, rank, holders)
            if one is not None and _is_good(one):
                return one
    return None


def lent_to(directory: Path, rank: int, step: int, world_size: int, part: bytes) -> Borrowed | None:
    """Return a rank's state of a step by another rank's snapshot. ``part``: what is its own, as it was recorded."""
    for (its_step, number, world), holders in sorted(_moments(directory).items(), reverse=True):
        record = BoundaryRecord(step, world_size, number, False, part)
        holder = holder_of(record, holders.values()) if (its_step, world) == (step, world_size) else None
        if holder is not None:
            return Borrowed(rank, holder, record, _differing(directory, holder, rank))
    return None


def _moments(directory: Path) -> dict[_Moment, dict[int, arena.HeldSnapshot]]:
    """Return the snapshots by moment and rank."""
    found: dict[_Moment, dict[int, arena.HeldSnapshot]] = defaultdict(dict)
    for held in arena.scan(directory):
        found[held.step, held.round, held.world_size][held.rank] = held
    return found


def _recorded(directory: Path) -> set[int]:
    try:
        return {int(name[1]) for path in directory.iterdir() if (name := _RECORD_NAME.fullmatch(path.name))}
    except OSError:
        return set()


def _borrowed(directory: Path, rank: int, holders: dict[int, arena.HeldSnapshot]) -> Borrowed | None:
    """Return how a rank of this node gets its state by these snapshots of one moment."""
    one = holders[min(holders)]
    if not 0 <= one.local_rank + rank - one.rank < one.local_world_size:
        return None
    record = record_of(read_records(record_path(directory, rank)), one.step, one.round, one.world_size)
    holder = None if record is None else holder_of(record, holders.values())
    if record is None or holder is None:
        return None
    return Borrowed(rank, holder, record, _differing(directory, holder, rank))


def holder_of(record: BoundaryRecord, holders: Iterable[arena.HeldSnapshot]) -> arena.HeldSnapshot | None:
    """Return the first snapshot that has the tensors of the rank that left the record."""
    try:
        group = decode_part(record.part).group
        return next((held for held in sorted(holders, key=lambda one: one.rank) if _group(held) == group), None)
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
    if data is None:
        return None
    return table_group(checked_table(header, data[PAGE:]))


def _is_good(one: Borrowed) -> bool:
    try:
        own_of(one)
    except (CheckpointError, OSError):
        return False
    return True


def record_of(
    records: Collection[BoundaryRecord], step: int, round_number: int, world_size: int
) -> BoundaryRecord | None:
    """Return the record of a step; of two, the one at the boundary."""
    wanted = (step, round_number, world_size)
    found = [record for record in records if (record.step, record.round, record.world_size) == wanted]
    return max(found, key=lambda record: record.order, default=None)


def replica(one: Borrowed) -> ReplicaCopy:
    """Return it as a copy that relies on the holder's snapshot. Raises CheckpointError, OSError."""
    holder, own = one.holder, own_of(one)
    size = holder.size_bytes - PAGE
    parts, kept = [CopyPart(PAGE, size, holder.rank, PAGE)], b""
    for at, data in own.parts:
        parts.append(CopyPart(at, len(data), -1, len(kept)))
        kept += data
    return ReplicaCopy(arena.page(own.header), own.header, parts, kept, [holder])


def own_of(one: Borrowed, file: int | None = None) -> Own:
    """Return what is the rank's own. ``file``: the holder's arena, if it is locked. Raises CheckpointError, OSError."""
    if file is not None:
        return _own(file, one)
    file = locked(one.holder)
    try:
        return _own(file, one)
    finally:
        os.close(file)


def locked(holder: arena.HeldSnapshot) -> int:
    """Return a descriptor that keeps a snapshot from being overwritten. Raises CheckpointError where it was."""
    file = arena.lock_snapshot(holder)
    if file is None:
        raise CheckpointError(f"the snapshot of step {holder.step} of rank {holder.rank} is gone")
    return file


def _own(file: int, one: Borrowed) -> Own:
    holder, record = one.holder, one.record
    header = arena.header_of(file)
    if header is None or record.world_size != header.world_size:
        raise CheckpointError(f"the snapshot of step {holder.step} of rank {holder.rank} is another one")
    table = checked_table(header, os.pread(file, header.table_size, header.table_offset))
    its_tree = os.pread(file, table.tree.size_bytes, table.tree.offset)
    if crc32c(its_tree) != table.tree.crc32c:
        raise CheckpointError(f"the snapshot of step {holder.step} of rank {holder.rank} is damaged")
    part = decode_part(record.part)
    if others := set(one.known) - {tensor.path for tensor in part.tensors}:
        raise CheckpointError(f"{min(others)} is another tensor on each rank, and not in what the lost rank left")
    tree = filled(part.outline, its_tree)
    tree_at = -(-header.size_bytes // 64) * 64
    tensors_at = -(-(tree_at + len(tree)) // 64) * 64
    records, tensors = with_own(table, part, tensors_at)
    own_table = RankTable(Extent(tree_at, len(tree), crc32c(tree)), tuple(records))
    data = msgspec.json.encode(own_table)
    table_at = -(-(tensors_at + len(tensors)) // 64) * 64
    mine = replace(header, rank=one.rank, local_rank=one.local_rank, size_bytes=table_at + len(data))
    mine = replace(mine, table_offset=table_at, table_size=len(data), table_crc32c=crc32c(data))
    parts = ((tree_at, tree), (tensors_at, tensors), (table_at, data))
    return Own(mine, own_table, tree, tuple(part for part in parts if part[1]))


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


def make(pair: ArenaPair, one: Borrowed) -> None:
    """Make the rank's own snapshot in its arena: the holder's tensors, and what is its own.

    Raises CheckpointError, OSError.
    """
    file = locked(one.holder)
    try:
        own = own_of(one, file)
        _fill(pair, own, map_shared(file, one.holder.size_bytes, False))
    finally:
        os.close(file)


def _fill(pair: ArenaPair, own: Own, source: memoryview) -> None:
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
    pair.finish(slot, replace(own.header, sequence=sequence))
