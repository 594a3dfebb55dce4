"""Putting a flattened state into an arena: one pass of copies, each block's checksum computed on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from resilio_hpc.ckpt import tensors
from resilio_hpc.ckpt.arena import PAGE, Header
from resilio_hpc.ckpt.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.records import BLOCK_BYTES, Extent, Table, TensorRecord, blocks
from resilio_hpc.ckpt.tensors import Leaf
from resilio_hpc.ckpt.tree import Flattened
from resilio_hpc.native import copy_crc32c, crc32c

_LARGE = 64 * 1024
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Plan:
    """Where everything of a snapshot goes in its arena. ``room_bytes`` includes a bound for the table."""

    offsets: tuple[int, ...]
    tree_offset: int
    table_offset: int
    room_bytes: int


def plan(leaves: Iterable[Leaf], tree_size: int) -> Plan:
    """Large tensors begin on a page (for direct I/O later), small ones on a cache line."""
    at, offsets, table_bound = PAGE, [], 1024
    for leaf in leaves:
        alignment = PAGE if leaf.size_bytes >= _LARGE else 64
        at = -(-at // alignment) * alignment
        offsets.append(at)
        at += leaf.size_bytes
        # each character may become six in JSON; 24 bytes hold any number
        table_bound += 6 * len(leaf.path) + 24 * (8 + len(leaf.shape) + len(blocks(leaf.size_bytes)))
    table_offset = -(-(at + tree_size) // 64) * 64
    return Plan(tuple(offsets), at, table_offset, table_offset + table_bound)


def take(pair: ArenaPair, step: int, state: Flattened, pool: ThreadPoolExecutor) -> tuple[Path, int]:
    """Copy ``state`` into one of the rank's arenas: the arena and the size of the snapshot, which is whole on return.

    Raises OSError or CheckpointError; then the former snapshot is what it was.
    """
    layout = plan(state.leaves, len(state.tree))
    slot, room, sequence = pair.reserve(step, layout.room_bytes)
    try:
        with room:
            checksums = _copy(state.leaves, layout.offsets, room, pool)
            room[layout.tree_offset : layout.tree_offset + len(state.tree)] = state.tree
            table = Table(
                Extent(layout.tree_offset, len(state.tree), crc32c(state.tree)),
                tuple(map(_record, state.leaves, layout.offsets, checksums)),
            )
            data = _encode(table)
            end = layout.table_offset + len(data)
            room[layout.table_offset : end] = data
        pair.finish(slot, _header(pair.owner, step, sequence, layout.table_offset, data, end))
    except BaseException:
        pair.abandon(slot)
        raise
    return slot.path, end


def _record(leaf: Leaf, offset: int, checksums: list[int]) -> TensorRecord:
    return TensorRecord(leaf.path, leaf.kind, leaf.dtype, leaf.shape, offset, leaf.size_bytes, tuple(checksums))


def _header(owner: Owner, step: int, sequence: int, table_offset: int, table: bytes, end: int) -> Header:
    return Header(
        step=step,
        sequence=sequence,
        rank=owner.rank,
        local_rank=owner.local_rank,
        world_size=owner.world_size,
        local_world_size=owner.local_world_size,
        round=owner.round,
        layout=owner.layout,
        run_id=owner.run_id,
        table_offset=table_offset,
        table_size=len(table),
        table_crc32c=crc32c(table),
        size_bytes=end,
    )


def _copy(
    leaves: tuple[Leaf, ...], offsets: tuple[int, ...], room: memoryview, pool: ThreadPoolExecutor
) -> list[list[int]]:
    """Copy every tensor; the checksums of its blocks. Large blocks go through ``pool``, which runs without the GIL."""
    checksums: list[list[int]] = []
    pending: list[tuple[list[int], int, Callable[[], int]]] = []
    for leaf, offset in zip(leaves, offsets, strict=True):
        target = room[offset : offset + leaf.size_bytes]
        source = tensors.bytes_of(leaf.value)
        if source is None:
            tensors.copy_out(leaf.value, target)
        mine = [0] * len(blocks(leaf.size_bytes))
        checksums.append(mine)
        for start, size in blocks(leaf.size_bytes):
            part = target[start : start + size]
            if source is None:
                mine[start // BLOCK_BYTES] = crc32c(part)
            elif size < _LARGE:
                mine[start // BLOCK_BYTES] = copy_crc32c(part, source[start : start + size])
            else:
                future = pool.submit(copy_crc32c, part, source[start : start + size])
                pending.append((mine, start // BLOCK_BYTES, future.result))
    failure: BaseException | None = None
    for mine, index, result in pending:
        try:
            mine[index] = result()
        except BaseException as error:  # noqa: BLE001 - raised below, once no thread writes to the arena any more
            failure = error
    if failure is not None:
        raise failure
    return checksums
