"""Writing one node's shard file: HDF5 whose metadata h5py makes, and whose data we write at the datasets' offsets.

Dataset ``/rank<R>/<path of the tensor>`` for each tensor, contiguous; ``/rank<R>/$tree`` and ``/rank<R>/$table`` (JSON
as bytes) for the plain values and the table. The attribute ``dtype`` names what HDF5 has no name for: see
``stored_types``.

libhdf5 never touches the disk: it would not take an error of the disk well, and h5py keeps the interpreter locked while
libhdf5 waits, so a file system that hangs would stop training. It makes a file in memory, with a hole for each tensor.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import msgspec

from resilio_hpc.ckpt import bulk_io
from resilio_hpc.ckpt.arena import PAGE
from resilio_hpc.ckpt.arena_source import ArenaSource
from resilio_hpc.ckpt.bulk_io import Block, Piece
from resilio_hpc.ckpt.extents import hash_gaps
from resilio_hpc.ckpt.records import Extent, RankRecord, ShardRecord, SlabRecord, Table, TensorRecord, blocks, sha256
from resilio_hpc.ckpt.stored_types import BYTE, Stored, stored_as
from resilio_hpc.core.durable import sync_directory
from resilio_hpc.core.errors import CorruptCheckpoint
from resilio_hpc.native import crc32c

_PIECE_BYTES = 1 << 20
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class _Place:
    """Where something goes: ``size`` bytes from ``start`` of an arena on, or ``data``, to ``offset`` of the file."""

    offset: int
    size: int
    start: int = 0
    data: bytes | None = None


def write_shard(arenas: Sequence[ArenaSource], directory: Path, node_rank: int) -> ShardRecord:
    """Write ``directory/node-<node_rank>.h5`` from whole snapshots, durable on return, each block verified.

    Raises CorruptCheckpoint (a bad arena; nothing remains) or OSError (disk full, I/O error; nothing remains).
    """
    name = f"node-{node_rank}.h5"
    path, temporary = directory / name, directory / f".{name}.{os.getpid()}.tmp"
    image = os.memfd_create("resilio-hdf5", os.MFD_CLOEXEC)
    try:
        _check_space(directory, sum(arena.header.size_bytes for arena in arenas))
        places, ranks = _make_metadata(image, arenas)
        size, metadata = _write_data(temporary, image, list(zip(arenas, places, strict=True)))
        temporary.rename(path)
    finally:
        os.close(image)
        temporary.unlink(missing_ok=True)
    sync_directory(directory)
    return ShardRecord(node_rank, name, size, arenas[0].header.layout, tuple(ranks), metadata)


def _check_space(directory: Path, size: int) -> None:
    """Refuse what cannot fit before the disk is filled to the brim: others write there too."""
    found = os.statvfs(directory)
    if found.f_bavail * found.f_frsize < size + (1 << 20):
        raise OSError(errno.ENOSPC, f"no space left for a checkpoint of {size} bytes", str(directory))


def _make_metadata(image: int, arenas: Sequence[ArenaSource]) -> tuple[list[list[_Place]], list[RankRecord]]:
    """Make a file (its descriptor: ``image``) with nothing but metadata; what goes where, and each rank's record."""
    places: list[list[_Place]] = [[] for _ in arenas]
    ranks = []
    try:
        with (
            open(image, "r+b", buffering=0, closefd=False) as memory,
            h5py.File(memory, "w", libver="latest", alignment_threshold=64 * 1024, alignment_interval=PAGE) as file,
        ):
            file.attrs["format"] = "resilio-checkpoint"
            file.attrs["step"] = arenas[0].step
            for arena, mine in zip(arenas, places, strict=True):
                group = file.create_group(f"rank{arena.header.rank}")
                ranks.append(_make_rank(group, arena, mine))
    except (RuntimeError, ValueError) as error:  # how h5py reports what libhdf5 could not do
        raise OSError(errno.ENOMEM, f"libhdf5: {error}") from error
    return places, ranks


def _make_rank(group: Any, arena: ArenaSource, places: list[_Place]) -> RankRecord:
    mine = arena.header.layout == "own" or arena.header.rank == 0
    records = tuple(
        _make_tensor(group, name, record, places)
        if (mine if record.slab is None else record.slab.replica == 0)
        else msgspec.structs.replace(record, offset=-1, checksums=())
        for record, name in zip(arena.tensors, _names(arena.tensors), strict=True)
    )
    tree_offset = _make_bytes(group, "$tree", arena.tree, places)
    table = _encode(Table(Extent(tree_offset, len(arena.tree), crc32c(arena.tree)), records))
    extent = Extent(_make_bytes(group, "$table", table, places), len(table), crc32c(table))
    return RankRecord(arena.header.rank, extent, sha256(table))


def _names(records: Sequence[TensorRecord]) -> Iterator[str]:
    """Of the datasets: the paths, numbered where a rank has several parts of one tensor."""
    seen: Counter[str] = Counter()
    for record in records:
        seen[record.path] += 1
        yield record.path if seen[record.path] == 1 else f"{record.path}${seen[record.path]}"


def _make_tensor(group: Any, name: str, record: TensorRecord, places: list[_Place]) -> TensorRecord:
    offset = _make_dataset(group, name, stored_as(record), record.slab)
    places.append(_Place(offset, record.size_bytes, record.offset))
    return msgspec.structs.replace(record, offset=offset)


def _make_bytes(group: Any, name: str, data: bytes, places: list[_Place]) -> int:
    offset = _make_dataset(group, name, Stored(BYTE, (len(data),)))
    places.append(_Place(offset, len(data), data=data))
    return offset


def _make_dataset(group: Any, name: str, stored: Stored, slab: SlabRecord | None = None) -> int:
    """Allocate a contiguous dataset without writing to it; where its bytes begin in the file."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    space = h5py.h5s.create_simple(stored.shape) if stored.shape else h5py.h5s.create(h5py.h5s.SCALAR)
    dataset = h5py.h5d.create(group.id, name.encode("utf-8"), stored.type, space, dcpl=properties, lcpl=links)
    if stored.name:
        h5py.Dataset(dataset).attrs["dtype"] = stored.name
    if slab is not None and slab.global_shape != stored.shape:
        h5py.Dataset(dataset).attrs["global_shape"] = slab.global_shape
        h5py.Dataset(dataset).attrs["start"] = slab.start
    return dataset.get_offset() or 0


def _write_data(path: Path, image: int, contents: Sequence[tuple[ArenaSource, Sequence[_Place]]]) -> tuple[int, str]:
    """Write everything in its place, each block verified, and make the file durable; its size, and its metadata's
    hash."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(image).st_size
        os.posix_fallocate(fd, 0, size)  # a full disk shows now
        _copy_metadata(image, fd, size)
        metadata = hash_gaps(fd, [(place.offset, place.size) for _, places in contents for place in places], size)
        for arena, places in contents:
            _write_rank(fd, arena, places)
        os.fsync(fd)
        return size, metadata
    finally:
        os.close(fd)


def _copy_metadata(image: int, fd: int, size: int) -> None:
    """All that is not a hole."""
    end = 0
    while end < size:
        try:
            at = os.lseek(image, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole until the end
                return
            raise
        end = os.lseek(image, at, os.SEEK_HOLE)
        for start in range(at, end, _PIECE_BYTES):
            data = os.pread(image, min(_PIECE_BYTES, end - start), start)
            _pwrite(fd, memoryview(data), start)


def _write_rank(fd: int, arena: ArenaSource, places: Sequence[_Place]) -> None:
    """Whole pages that begin on a page of both go past the page cache, the rest through it."""
    pieces: list[Piece] = []
    taken = {place.start for place in places if place.data is None}
    records = [record for record in arena.tensors if record.offset in taken]
    for place in places:
        aligned = place.data is None and place.offset % PAGE == place.start % PAGE == 0
        whole = place.size - place.size % PAGE if aligned else 0
        if whole:
            pieces.append(Piece(place.start, place.offset, whole))
        rest = arena.slice(place.start, place.size) if place.data is None else memoryview(place.data)
        _pwrite(fd, rest[whole:], place.offset + whole)
    named = [
        (Block(record.offset + start, checksum, size), record.path)
        for record in sorted(records, key=lambda record: record.offset)
        for (start, size), checksum in zip(blocks(record.size_bytes), record.checksums, strict=True)
    ]
    bad = bulk_io.write(fd, arena.view, sorted(pieces), [block for block, _ in named])
    if bad is not None:
        raise CorruptCheckpoint(f"tensor {named[bad][1]} does not match its checksum in the arena")


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
