"""Writing one node's shard file: HDF5 whose metadata h5py makes, and whose data we write at the datasets' offsets.

Dataset ``/rank<R>/<path of the tensor>`` for each tensor, contiguous; ``/rank<R>/$tree`` and ``/rank<R>/$table`` (JSON
as bytes) for the plain values and the table. A dtype that HDF5 lacks (bfloat16, float8, strings of numpy) is stored as
bytes with one more dimension, and named in the attribute ``dtype``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy

from resilio_hpc.ckpt.arena import PAGE
from resilio_hpc.ckpt.records import Extent, RankRecord, ShardRecord, Table, TensorRecord, blocks, sha256
from resilio_hpc.ckpt.sources import ArenaSource
from resilio_hpc.core.durable import sync_directory
from resilio_hpc.core.errors import CorruptCheckpoint
from resilio_hpc.native import crc32c

_encode = msgspec.json.Encoder().encode
_AS_THEY_ARE = {"bool"} | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_AS_THEY_ARE |= {"float16", "float32", "float64", "complex64", "complex128"}


@dataclass(frozen=True)
class _Piece:
    """Bytes that go to ``offset`` of the shard file."""

    offset: int
    data: memoryview | bytes
    what: str
    checksums: tuple[int, ...]
    on_pages: bool = False
    """Does ``data`` begin on a page of memory, as direct I/O wants?"""


def write_shard(arenas: Sequence[ArenaSource], directory: Path, node_rank: int) -> ShardRecord:
    """Write ``directory/node-<node_rank>.h5`` from whole snapshots, durable on return, each block verified.

    Raises CorruptCheckpoint (a bad arena; nothing remains) or OSError (disk full, I/O error; nothing remains).
    """
    name = f"node-{node_rank}.h5"
    path, temporary = directory / name, directory / f".{name}.{os.getpid()}.tmp"
    try:
        _check_space(directory, sum(arena.header.size_bytes for arena in arenas))
        pieces, ranks = _make_metadata(temporary, arenas)
        size = _write_data(temporary, pieces)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(directory)
    return ShardRecord(node_rank, name, size, arenas[0].header.layout, tuple(ranks))


def _check_space(directory: Path, size: int) -> None:
    """libhdf5 does not take a full disk well: refuse before it begins."""
    found = os.statvfs(directory)
    if found.f_bavail * found.f_frsize < size + (1 << 20):
        raise OSError(errno.ENOSPC, f"no space left for a checkpoint of {size} bytes", str(directory))


def _make_metadata(path: Path, arenas: Sequence[ArenaSource]) -> tuple[list[_Piece], list[RankRecord]]:
    pieces: list[_Piece] = []
    ranks = []
    try:
        with h5py.File(
            path, "w", libver="latest", locking=False, alignment_threshold=64 * 1024, alignment_interval=PAGE
        ) as file:
            file.attrs["format"] = "resilio-checkpoint"
            file.attrs["step"] = arenas[0].step
            for arena in arenas:
                group = file.create_group(f"rank{arena.header.rank}")
                ranks.append(_make_rank(group, arena, pieces))
    except (RuntimeError, ValueError) as error:  # how h5py reports what libhdf5 could not do
        raise OSError(errno.EIO, f"libhdf5: {error}", str(path)) from error
    return pieces, ranks


def _make_rank(group: Any, arena: ArenaSource, pieces: list[_Piece]) -> RankRecord:
    mine = arena.header.layout == "own" or arena.header.rank == 0
    records = tuple(
        _make_tensor(group, arena, record, pieces)
        if mine
        else TensorRecord(record.path, record.kind, record.dtype, record.shape, -1, record.size_bytes, ())
        for record in arena.tensors
    )
    tree_offset = _make_bytes(group, "$tree", arena.tree, pieces)
    table = _encode(Table(Extent(tree_offset, len(arena.tree), crc32c(arena.tree)), records))
    extent = Extent(_make_bytes(group, "$table", table, pieces), len(table), crc32c(table))
    return RankRecord(arena.header.rank, extent, sha256(table))


def _make_tensor(group: Any, arena: ArenaSource, record: TensorRecord, pieces: list[_Piece]) -> TensorRecord:
    dtype, shape = _stored_as(record)
    offset = _make_dataset(group, record.path, dtype, shape, record.dtype if shape != record.shape else "")
    data, on_pages = arena.slice(record.offset, record.size_bytes), record.offset % PAGE == 0
    pieces.append(_Piece(offset, data, f"tensor {record.path}", record.checksums, on_pages))
    return TensorRecord(
        record.path, record.kind, record.dtype, record.shape, offset, record.size_bytes, record.checksums
    )


def _make_bytes(group: Any, name: str, data: bytes, pieces: list[_Piece]) -> int:
    offset = _make_dataset(group, name, numpy.dtype("u1"), (len(data),), "")
    pieces.append(_Piece(offset, data, name, tuple(crc32c(data[start : start + n]) for start, n in blocks(len(data)))))
    return offset


def _make_dataset(group: Any, name: str, dtype: Any, shape: tuple[int, ...], real_dtype: str) -> int:
    """Allocate a contiguous dataset without writing to it; where its bytes begin in the file."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    space = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
    stored = h5py.h5t.py_create(dtype, logical=True)
    dataset = h5py.h5d.create(group.id, name.encode("utf-8"), stored, space, dcpl=properties, lcpl=links)
    if real_dtype:
        h5py.Dataset(dataset).attrs["dtype"] = real_dtype
    return dataset.get_offset() or 0


def _stored_as(record: TensorRecord) -> tuple[Any, tuple[int, ...]]:
    """The numpy dtype and the shape that a tensor has in the file."""
    if record.kind == "torch":
        if record.dtype in _AS_THEY_ARE:
            return numpy.dtype(record.dtype), record.shape
    else:
        dtype = numpy.dtype(record.dtype)
        if dtype.name in _AS_THEY_ARE:
            return dtype, record.shape
    count = 1
    for length in record.shape:
        count *= length
    return numpy.dtype("u1"), (*record.shape, record.size_bytes // count if count else 1)


def _write_data(path: Path, pieces: Sequence[_Piece]) -> int:
    """Write every piece in its place, verified block by block, and make the file durable; its size."""
    with ExitStack() as stack:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        direct_fd = _open_direct(path)
        if direct_fd is not None:
            stack.callback(os.close, direct_fd)
        size = os.fstat(fd).st_size
        os.posix_fallocate(fd, 0, size)  # a full disk shows now
        for piece in sorted(pieces, key=lambda piece: piece.offset):
            for (start, count), expected in zip(blocks(len(piece.data)), piece.checksums, strict=True):
                block = memoryview(piece.data)[start : start + count]
                if crc32c(block) != expected:
                    raise CorruptCheckpoint(f"{piece.what} does not match its checksum in the arena")
                offset, whole = piece.offset + start, count - count % PAGE
                if whole and piece.on_pages and offset % PAGE == 0 and _write_direct(direct_fd, block[:whole], offset):
                    block, offset = block[whole:], offset + whole
                _pwrite(fd, block, offset)
        os.fsync(fd)
        return size


def _open_direct(path: Path) -> int | None:
    """The page cache spreads a large write over seconds (dirty-page throttling): go past it where that is possible."""
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None


def _write_direct(fd: int | None, data: memoryview, offset: int) -> bool:
    """Write past the page cache; False where this file system does not take it so."""
    if fd is None:
        return False
    try:
        _pwrite(fd, data, offset)
    except OSError as error:
        if error.errno == errno.EINVAL:  # a larger alignment than a page, or a rest after a short write
            return False
        raise
    return True


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
