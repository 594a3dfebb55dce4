"""Reads boxes of saved tensors into the tensors of a load: directly, or through a buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from resilio_hpc.ckpt.dcp.metadata import SavedTensor
from resilio_hpc.ckpt.format.manifest import Manifest, TensorRecord
from resilio_hpc.ckpt.restore.shard_files import ShardFiles
from resilio_hpc.ckpt.restore.shared_blocks import SharedBlocks, name_of
from resilio_hpc.ckpt.restore.slab_reader import Part, read_parts
from resilio_hpc.ckpt.restore.whole_reader import read_whole
from resilio_hpc.ckpt.state import tensors
from resilio_hpc.ckpt.state.slab import Box
from resilio_hpc.ckpt.store.shard_reader import ShardReader
from resilio_hpc.ckpt.tiers.peer_disks import PeerDisks, PeerFile

_BOUNCED_BYTES = 1 << 30
"""What may wait at a time for its copy to a device, into a strided tensor or into another dtype."""


class BoxRead(NamedTuple):
    """``box`` of a saved tensor goes into ``target``, which has its shape."""

    saved: SavedTensor
    box: Box
    target: Any


class Origin(NamedTuple):
    """Where the files of a step are.

    ``directory``: its own; ``copies``, ``peers``: see ``ShardFiles``, and ``peer_disks``.
    """

    directory: Path
    manifest: Manifest
    copies: Mapping[str, Path]
    peers: Path | None


def read_boxes(origin: Origin, reads: Sequence[BoxRead], alone: bool, local_rank: int, threads: int) -> None:
    """Fill all targets.

    ``alone``: no other process of this node reads the same; ``local_rank``: see ``read_parts``. Raises
    CorruptCheckpoint for bytes that do not match their checksum, OSError for a device that fails.
    """
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(threads, "resilio-read"))
        manifest = origin.manifest
        shared = stack.enter_context(closing(SharedBlocks(name_of(origin.directory, manifest))))
        peers = PeerDisks(origin.peers, manifest)
        files = stack.enter_context(closing(ShardFiles(origin.directory, origin.copies, peers)))
        readers: dict[int, ShardReader] = {}
        for rank in {read.saved.rank for read in reads}:
            readers[rank] = files.reader(manifest.shard_of(rank)[0])
        for batch in _batches([read for read in reads if read.box.size]):
            # other processes of this node probably read a whole tensor as well
            for direct in (True, False):
                some = [
                    (readers[entry[0].saved.rank], *entry)
                    for entry in batch
                    if (alone or _is_own_part(entry[0])) is direct
                ]
                for copy, of_copy in files.by_copy(some).items():
                    files.read(copy, partial(_fill, manifest.step, of_copy, direct, pool, local_rank, shared))
            for read, memory in batch:
                if memory is not read.target:
                    tensors.copy_into(read.target, memory)


def _is_own_part(read: BoxRead) -> bool:
    return bool(read.box.shape == read.saved.record.shape != read.saved.whole[2])


def _batches(reads: Sequence[BoxRead]) -> Iterator[list[tuple[BoxRead, Any]]]:
    """Yield batches of reads, each with the tensor that its bytes go to first."""
    batch: list[tuple[BoxRead, Any]] = []
    bounced_bytes = 0
    for read in reads:
        record = read.saved.record
        memory = read.target
        if not _is_like(read.target, record.dtype) or tensors.bytes_of(memory) is None:
            if bounced_bytes > _BOUNCED_BYTES:
                yield batch
                batch, bounced_bytes = [], 0
            memory = tensors.empty(record.kind, record.dtype, read.box.shape)
            bounced_bytes += memory.nbytes
        batch.append((read, memory))
    yield batch


def _is_like(target: Any, dtype: str) -> bool:
    return not hasattr(target, "untyped_storage") or target.dtype == tensors.torch_dtype(dtype)


def _fill(
    step: int,
    batch: Sequence[tuple[ShardReader, BoxRead, Any]],
    direct: bool,
    pool: ThreadPoolExecutor,
    local_rank: int,
    shared: SharedBlocks,
    peer: PeerFile | None,
) -> None:
    wholes: dict[tuple[ShardReader, int], tuple[ShardReader, TensorRecord, memoryview]] = {}
    parts: list[Part] = []
    for reader, read, tensor in batch:
        record, memory = read.saved.record, tensors.bytes_of(tensor)
        assert memory is not None
        if read.box.shape == record.shape and (reader, record.offset) not in wholes:
            wholes[reader, record.offset] = (reader, record, memory)
        else:  # also one that is read twice: two names of one tensor
            parts.append(Part(reader, record, read.box, memory, read.box.shape, (0,) * len(read.box.shape)))
    read_whole(step, list(wholes.values()), direct, pool, shared, peer)
    read_parts(step, parts, direct, pool, local_rank, shared, peer)
