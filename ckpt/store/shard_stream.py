"""Writes one rank's shard file from tensors that need not fit into memory: each is read once, piece by piece.

``shard_file`` writes from arenas, whose checksums are known beforehand. Here they come with the bytes, so the table is
written last, into a space for the longest possible one.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from resilio_hpc.ckpt.format import bulk_io
from resilio_hpc.ckpt.format.bulk_io import PageRun
from resilio_hpc.ckpt.format.files import NewFile
from resilio_hpc.ckpt.format.manifest import (
    Extent,
    Layout,
    RankRecord,
    RankTable,
    ShardRecord,
    SlabRecord,
    TensorRecord,
    blocks,
    sha256,
)
from resilio_hpc.ckpt.format.pages import PAGE
from resilio_hpc.ckpt.format.shard_metadata import HdfImage, RankPart
from resilio_hpc.ckpt.format.source import Progress
from resilio_hpc.ckpt.state import tensors
from resilio_hpc.ckpt.state.slab import runs
from resilio_hpc.ckpt.state.tensors import Leaf
from resilio_hpc.ckpt.state.tree import Flattened
from resilio_hpc.ckpt.store.mounts import store_of
from resilio_hpc.native import crc32c

_PART_BYTES = 16 << 20
_LONGEST_CHECKSUM = (1 << 32) - 1
_MADV_PAGEOUT = 21  # asm-generic/mman-common.h; Linux 5.4
_encode = msgspec.json.Encoder().encode
_libc = ctypes.CDLL(None)


def write_stream(
    step: int,
    layout: Layout,
    state: Flattened,
    directory: Path,
    progress: Progress,
    fetch: Callable[[Leaf], Any] | None = None,
) -> ShardRecord:
    """Write ``directory/node-0.h5`` for rank 0 of a world of one, durable on return.

    ``fetch``: returns a leaf's tensor, one at a time; None: the leaves' own are mapped from files, and their pages are
    released once they are written. In layout "own" each tensor is a slab of itself, so that any number of processes can
    take parts of it. ``progress`` is called for every byte. Raises OSError.
    """
    store = store_of(directory)
    store.check_space(directory, sum(leaf.size_bytes for leaf in state.leaves) + len(state.tree))
    path = directory / "node-0.h5"
    part = RankPart(step, 0, layout, state.tree, [_record(leaf, layout) for leaf in state.leaves])
    with store.new_file(path) as file:
        with HdfImage([part]) as image:
            metadata = image.write(file)
        *of_tensors, tree, table = image.places[0]
        records = []
        writer = _Writer(file, progress, let_go=fetch is None)
        for leaf, record, place in zip(state.leaves, part.tensors, of_tensors, strict=True):
            checksums = writer.write(leaf.value if fetch is None else fetch(leaf), place.offset)
            records.append(msgspec.structs.replace(record, offset=place.offset, checksums=tuple(checksums)))
        text = state.tree.ljust(tree.size)
        file.write_small(memoryview(text), tree.offset)
        extent = Extent(tree.offset, len(text), crc32c(text))
        data = _encode(RankTable(extent, tuple(records))).ljust(table.size)
        file.write_small(memoryview(data), table.offset)
    rank = RankRecord(0, Extent(table.offset, len(data), crc32c(data)), sha256(data))
    return ShardRecord(0, path.name, image.size_bytes, layout, (rank,), metadata)


def _record(leaf: Leaf, layout: Layout) -> TensorRecord:
    checksums = tuple(_LONGEST_CHECKSUM for _ in blocks(leaf.size_bytes))
    slab = SlabRecord(leaf.shape, (0,) * len(leaf.shape)) if layout == "own" else None
    return TensorRecord(leaf.path, leaf.kind, leaf.dtype, leaf.shape, 0, leaf.size_bytes, checksums, slab)


class _Writer:
    """Writes tensors past the page cache, through a buffer of many blocks."""

    def __init__(self, file: NewFile, progress: Progress, let_go: bool) -> None:
        self._file, self._progress, self._let_go = file, progress, let_go
        self._room = memoryview(mmap.mmap(-1, bulk_io.ROOM_BYTES))

    def write(self, tensor: Any, offset: int) -> list[int]:
        """Write a tensor; return the CRC32C of each of its blocks."""
        checksums: list[int] = []
        filled = 0
        for run in _runs_of(tensor):
            at = 0
            while at < len(run):
                size = min(len(run) - at, bulk_io.ROOM_BYTES - filled)
                self._room[filled : filled + size] = run[at : at + size]
                at, filled = at + size, filled + size
                if filled == bulk_io.ROOM_BYTES:
                    checksums += self._flush(filled, offset)
                    offset, filled = offset + filled, 0
            if self._let_go and len(run) >= _PART_BYTES:
                _let_go(run)
        return checksums + self._flush(filled, offset)

    def _flush(self, size: int, offset: int) -> list[int]:
        whole = size - size % PAGE if offset % PAGE == 0 else 0
        if whole:
            self._file.write(self._room, [PageRun(0, offset, whole)], [])
        self._file.write_small(self._room[whole:size], offset + whole)
        self._progress(size)
        return [crc32c(self._room[start : start + length]) for start, length in blocks(size)]


def _runs_of(tensor: Any) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in row-major order.

    Its own memory, in pieces, or copies of parts if it is strided.
    """
    memory = tensors.bytes_of(tensor)
    if memory is not None:
        for start in range(0, len(memory), bulk_io.ROOM_BYTES):
            yield memory[start : start + bulk_io.ROOM_BYTES]
        return
    for box in runs(tuple(tensor.shape), _PART_BYTES // tensor.itemsize):
        part = tensor[tuple(slice(first, first + length) for first, length in zip(box.start, box.shape, strict=True))]
        copy = memoryview(bytearray(part.nbytes))
        tensors.copy_out(part, copy)
        yield copy


def _let_go(run: memoryview) -> None:
    """Let the kernel take these pages out of memory; in a file they stay."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(run))
    first = -(-address // PAGE) * PAGE
    size = (address + len(run) - first) // PAGE * PAGE
    _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _MADV_PAGEOUT)
