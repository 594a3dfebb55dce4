"""A rank's state without a snapshot of its own: another rank's tensors of the step, and what the rank itself left."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import msgspec

from resilio_hpc.ckpt.format.manifest import Extent, RankTable
from resilio_hpc.ckpt.format.own_parts import OwnPart, decode_part, filled, with_own
from resilio_hpc.ckpt.format.pages import PAGE
from resilio_hpc.ckpt.format.whole_snapshot import Header
from resilio_hpc.ckpt.replication.replica_copies import CopyPart, ReplicaCopy, checked_table
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.boundary_record import BoundaryRecord
from resilio_hpc.core.errors import CheckpointError
from resilio_hpc.native import crc32c


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


def table_of(file: int, holder: arena.HeldSnapshot) -> tuple[Header, RankTable, bytes]:
    """Return the header, the table and the tree of a locked snapshot. Raises CheckpointError."""
    header = arena.header_of(file)
    if header is None:
        raise CheckpointError(f"the snapshot of step {holder.step} of rank {holder.rank} is gone")
    table = checked_table(header, os.pread(file, header.table_size, header.table_offset))
    tree = os.pread(file, table.tree.size_bytes, table.tree.offset)
    if crc32c(tree) != table.tree.crc32c:
        raise CheckpointError(f"the snapshot of step {holder.step} of rank {holder.rank} is damaged")
    return header, table, tree


def check_known(one: Borrowed, part: OwnPart) -> None:
    """Raise CheckpointError where the holder's tensors are not all that the rank needs beside its own ones."""
    if others := set(one.known) - {tensor.path for tensor in part.tensors}:
        raise CheckpointError(f"{min(others)} is another tensor on each rank, and not in what the lost rank left")


def _own(file: int, one: Borrowed) -> Own:
    header, table, its_tree = table_of(file, one.holder)
    part = decode_part(one.record.part)
    check_known(one, part)
    if any(record.offset < 0 < record.size_bytes for record in table.tensors):
        raise CheckpointError(f"the snapshot of step {header.step} of rank {header.rank} leaves tensors out")
    tree = filled(part.outline, its_tree)
    tree_at = -(-header.size_bytes // 64) * 64
    tensors_at = -(-(tree_at + len(tree)) // 64) * 64
    records, tensors = with_own(table, part, tensors_at)
    own_table = RankTable(Extent(tree_at, len(tree), crc32c(tree)), tuple(records), table.group)
    data = msgspec.json.encode(own_table)
    table_at = -(-(tensors_at + len(tensors)) // 64) * 64
    mine = replace(header, rank=one.rank, local_rank=one.local_rank, size_bytes=table_at + len(data))
    mine = replace(mine, table_offset=table_at, table_size=len(data), table_crc32c=crc32c(data))
    parts = ((tree_at, tree), (tensors_at, tensors), (table_at, data))
    return Own(mine, own_table, tree, tuple(part for part in parts if part[1]))
