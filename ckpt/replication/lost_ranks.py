"""Snapshots of ranks that were lost: made of another rank's snapshot of the same step, and of what they left behind.

For layout REPLICATED, where ranks hold the same tensors. A rank that is killed leaves a record of its last boundaries
(``snapshot.boundary_record``); a rank that goes on saves its state of one of them.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import msgspec

from resilio_hpc.ckpt.format.manifest import REPLICATED, Extent, read_table
from resilio_hpc.ckpt.state.outline_text import filled
from resilio_hpc.ckpt.format.pages import PAGE
from resilio_hpc.ckpt.format.whole_snapshot import Header
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.boundary_record import BoundaryRecord, read_records, record_path
from resilio_hpc.core.errors import CheckpointError
from resilio_hpc.native import copy_blocks, crc32c, map_shared

_PIECE_BYTES = 8 << 20

Places = dict[int, int]
"""Local rank by rank."""


def complete(directory: Path, spill: Path, ranks: Places, round_number: int) -> tuple[int, list[int]]:
    """Give each of this node's ``ranks`` a snapshot of the newest step that all of them can have, of one round.

    Return that step, and the ranks for which one was made; (-1, []) where there is nothing to do. ``spill``: a folder
    on disk, for what does not fit into memory. Raises CheckpointError, OSError.
    """
    held: dict[int, dict[int, arena.HeldSnapshot]] = defaultdict(dict)  # by step and rank
    for snapshot in arena.scan(directory):
        if snapshot.rank in ranks and snapshot.round == round_number:
            held[snapshot.step][snapshot.rank] = snapshot
    records = {rank: read_records(record_path(directory, rank)) for rank in ranks}
    for step in sorted(held, reverse=True):
        missing = ranks.keys() - held[step].keys()
        if not missing:
            return -1, []  # nothing newer is possible
        found = {rank: _record(records[rank], step, round_number) for rank in missing}
        if any(record is None for record in found.values()):
            continue
        holder = min(held[step].values(), key=lambda one: one.rank)
        header = arena.read_header(holder.path)
        if header is None or header.layout != REPLICATED:
            continue
        for rank, record in sorted(found.items()):
            assert record is not None
            _make(directory, spill, holder, rank, ranks[rank], record)
        return step, sorted(missing)
    return -1, []


def _record(records: Collection[BoundaryRecord], step: int, round_number: int) -> BoundaryRecord | None:
    """Return the record of a step; of two, the one at the boundary, which comes last."""
    found = [record for record in records if (record.step, record.round) == (step, round_number)]
    return found[-1] if found else None


def _make(
    directory: Path, spill: Path, holder: arena.HeldSnapshot, rank: int, local_rank: int, record: BoundaryRecord
) -> None:
    """Make a rank's snapshot: the holder's tensors, and the rank's own tree."""
    file = arena.lock_snapshot(holder)
    if file is None:
        raise CheckpointError(f"the snapshot of step {holder.step} of rank {holder.rank} is gone")
    try:
        header = arena.header_of(file)
        if header is None or record.world_size != header.world_size:
            raise CheckpointError(f"the snapshot of step {holder.step} of rank {holder.rank} is another one")
        source = map_shared(file, holder.size_bytes, False)
        table = read_table(bytes(source[header.table_offset :][: header.table_size]), header.size_bytes)
        its_tree = bytes(source[table.tree.offset :][: table.tree.size_bytes])
        if crc32c(its_tree) != table.tree.crc32c:
            raise CheckpointError(f"the snapshot of step {holder.step} of rank {holder.rank} is damaged")
        tree = filled(record.outline, its_tree)
        tree_at = -(-header.size_bytes // 64) * 64
        extent = Extent(tree_at, len(tree), crc32c(tree))
        data = msgspec.json.encode(msgspec.structs.replace(table, tree=extent))
        table_at = -(-(tree_at + len(tree)) // 64) * 64
        owner = Owner(
            rank, local_rank, header.world_size, header.local_world_size, header.round, header.layout, header.run_id
        )
        pair = ArenaPair(directory, owner, spill)
        try:
            _fill(pair, header, source, (tree_at, tree), (table_at, data))
        finally:
            pair.close()
    finally:
        os.close(file)


def _fill(
    pair: ArenaPair, header: Header, source: memoryview, tree: tuple[int, bytes], table: tuple[int, bytes]
) -> None:
    owner, end = pair.owner, table[0] + len(table[1])
    slot, room, sequence = pair.reserve(header.step, end)
    try:
        with room:
            for start in range(PAGE, header.size_bytes, _PIECE_BYTES):
                copy_blocks(room, [(start, source, start, min(_PIECE_BYTES, header.size_bytes - start))])
            for at, data in (tree, table):
                room[at : at + len(data)] = data
    except BaseException:
        pair.abandon(slot)
        raise
    at, data = table
    its = replace(header, sequence=sequence, rank=owner.rank, local_rank=owner.local_rank, size_bytes=end)
    pair.finish(slot, replace(its, table_offset=at, table_size=len(data), table_crc32c=crc32c(data)))
