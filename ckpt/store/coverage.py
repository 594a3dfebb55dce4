"""Whether the parts of tensors that the ranks saved make up whole ones, checked before a step is committed.

The tables of all shard files tell; no tensor is read. They are read when the parts differ from the last commit's, or
where ranks wrote the same part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from math import prod
from pathlib import Path

from resilio_hpc.ckpt.format.manifest import ShardRecord, TensorRecord
from resilio_hpc.ckpt.state.slab import Box, any_overlap
from resilio_hpc.ckpt.store.mounts import store_of
from resilio_hpc.ckpt.store.shard_reader import ShardReader
from resilio_hpc.core.errors import CheckpointError

_good: dict[Path, tuple[str, ...]] = {}
"""Of each directory of checkpoints: the parts that were whole at the last commit, each written by one rank."""


def check_slabs(directory: Path, staging: Path, shards: Sequence[ShardRecord]) -> None:
    """Check a step; ``directory``: of the checkpoints; ``staging``: where its shards lie.

    Raises CheckpointError for parts that do not make up a whole tensor, that overlap, or that two ranks wrote
    differently; CorruptCheckpoint, OSError.
    """
    parts = tuple(shard.checks.slabs if shard.checks else "" for shard in shards)
    if not any(parts) or _good.get(directory) == parts:
        return
    if not store_of(staging).is_directory(staging, follow=True):
        return  # the step is committed, or the commit tells what is wrong
    held: dict[str, list[tuple[int, TensorRecord]]] = defaultdict(list)
    for found in store_of(staging).together(*(partial(_slabs, staging, shard) for shard in shards)):
        for rank, record in found:
            held[record.path].append((rank, record))
    are_single = [_is_whole(path, records) for path, records in held.items()]
    _good.pop(directory, None)
    if all(are_single):
        _good[directory] = parts


def _slabs(staging: Path, shard: ShardRecord) -> list[tuple[int, TensorRecord]]:
    with ShardReader(staging, shard) as reader:
        tables = [(rank.rank, reader.table(rank)) for rank in shard.ranks]
    return [(rank, record) for rank, table in tables for record in table.tensors if record.slab is not None]


def _is_whole(path: str, held: Sequence[tuple[int, TensorRecord]]) -> bool:
    """Return whether each part is written once. Raises CheckpointError unless all of them are one whole tensor."""
    first_rank, first = held[0]
    whole = _whole_shape(first)
    boxes: dict[Box, tuple[int, TensorRecord]] = {}
    is_single = True
    for rank, record in held:
        if (record.kind, record.dtype, _whole_shape(record)) != (first.kind, first.dtype, whole):
            raise CheckpointError(
                f"ranks {first_rank} and {rank} give {path} to different tensors: {first.dtype} {list(whole)} and "
                f"{record.dtype} {list(_whole_shape(record))}; each whole tensor has a place of its own in the state"
            )
        if record.offset < 0 or 0 in record.shape:
            continue
        assert record.slab is not None
        box = Box(record.slab.start, record.shape)
        other, same = boxes.setdefault(box, (rank, record))
        if same is not record:
            is_single = False
            if same.checksums != record.checksums:
                raise CheckpointError(
                    f"ranks {other} and {rank} wrote {list(box.shape)} at {list(box.start)} of {path} differently; "
                    "each whole tensor has a place of its own in the state, and copies are alike"
                )
    if any_overlap(list(boxes)):
        raise CheckpointError(f"the parts of {path} that the ranks saved overlap")
    size = sum(box.size for box in boxes)
    if size != prod(whole):
        raise CheckpointError(
            f"the ranks saved {size} of the {prod(whole)} elements of {path}; all processes that hold a part save it, "
            "and one of them as replica 0"
        )
    return is_single


def _whole_shape(record: TensorRecord) -> tuple[int, ...]:
    assert record.slab is not None
    return record.slab.global_shape
