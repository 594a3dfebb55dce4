"""The HDF5 metadata of a shard file, made by h5py; everything else is written at the offsets of its datasets.

Dataset ``/rank<R>/<path of the tensor>`` for each tensor, contiguous; ``/rank<R>/$tree`` and ``/rank<R>/$table`` (JSON
as bytes) for the plain values and the table. The attribute ``dtype`` names what HDF5 has no name for: see
``stored_types``.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import h5py
import msgspec

from resilio_hpc.ckpt import bulk_io
from resilio_hpc.ckpt.arena import PAGE
from resilio_hpc.ckpt.extents import hash_gaps
from resilio_hpc.ckpt.records import Extent, Layout, RankRecord, SlabRecord, Table, TensorRecord, sha256
from resilio_hpc.ckpt.stored_types import BYTE, Stored, stored_as
from resilio_hpc.native import crc32c

_PIECE_BYTES = 1 << 20
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class RankPart:
    """What a rank puts into the file. ``offset`` of its tensors: where their bytes are now."""

    step: int
    rank: int
    layout: Layout
    tree: bytes
    tensors: Sequence[TensorRecord]


@dataclass(frozen=True)
class Place:
    """Where something goes: ``size`` bytes from ``start`` of an arena on, or ``data``, to ``offset`` of the file."""

    offset: int
    size: int
    start: int = 0
    data: bytes | None = None


class HdfImage:
    """An HDF5 file in memory that is nothing but metadata, with a hole for each tensor, tree and table.

    libhdf5 never touches the disk: it would not take an error of the disk well, and h5py keeps the interpreter locked
    while libhdf5 waits, so a file system that hangs would stop training.
    """

    def __init__(self, parts: Sequence[RankPart]) -> None:
        """``places``: of each rank, what goes where, tree and table last. Raises OSError."""
        self.places: list[list[Place]] = [[] for _ in parts]
        self.ranks: list[RankRecord] = []
        self._fd = os.memfd_create("resilio-hdf5", os.MFD_CLOEXEC)
        try:
            self._make(parts)
        except (RuntimeError, ValueError) as error:  # how h5py reports what libhdf5 could not do
            self.close()
            raise OSError(errno.ENOMEM, f"libhdf5: {error}") from error
        except BaseException:
            self.close()
            raise
        self.size_bytes = os.fstat(self._fd).st_size

    def _make(self, parts: Sequence[RankPart]) -> None:
        with (
            open(self._fd, "r+b", buffering=0, closefd=False) as memory,
            h5py.File(memory, "w", libver="latest", alignment_threshold=64 * 1024, alignment_interval=PAGE) as file,
        ):
            file.attrs["format"] = "resilio-checkpoint"
            file.attrs["step"] = parts[0].step
            for part, places in zip(parts, self.places, strict=True):
                group = file.create_group(f"rank{part.rank}")
                self.ranks.append(_make_rank(group, part, places))

    def write(self, fd: int) -> str:
        """Make an empty file as large as it will be, and write the metadata; the hash of these. Raises OSError."""
        os.posix_fallocate(fd, 0, self.size_bytes)  # a full disk shows now
        for start, size in self._data():
            bulk_io.write_cached(fd, memoryview(os.pread(self._fd, size, start)), start)
        extents = [(place.offset, place.size) for places in self.places for place in places]
        return hash_gaps(fd, extents, self.size_bytes)

    def _data(self) -> Iterator[tuple[int, int]]:
        """(start, size) of all that is not a hole, in pieces."""
        end = 0
        while end < self.size_bytes:
            try:
                at = os.lseek(self._fd, end, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but a hole until the end
                    return
                raise
            end = os.lseek(self._fd, at, os.SEEK_HOLE)
            yield from ((start, min(_PIECE_BYTES, end - start)) for start in range(at, end, _PIECE_BYTES))

    def close(self) -> None:
        """Let the memory go."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _make_rank(group: Any, part: RankPart, places: list[Place]) -> RankRecord:
    mine = part.layout == "own" or part.rank == 0
    records = tuple(
        _make_tensor(group, name, record, places)
        if (mine if record.slab is None else record.slab.replica == 0)
        else msgspec.structs.replace(record, offset=-1, checksums=())
        for record, name in zip(part.tensors, dataset_names(part.tensors), strict=True)
    )
    tree_offset = _make_bytes(group, "$tree", part.tree, places)
    table = _encode(Table(Extent(tree_offset, len(part.tree), crc32c(part.tree)), records))
    extent = Extent(_make_bytes(group, "$table", table, places), len(table), crc32c(table))
    return RankRecord(part.rank, extent, sha256(table))


def dataset_names(records: Sequence[TensorRecord]) -> Iterator[str]:
    """Of a rank's tensors, below its group: the paths, numbered where a rank has several parts of one tensor."""
    seen: Counter[str] = Counter()
    for record in records:
        seen[record.path] += 1
        yield record.path if seen[record.path] == 1 else f"{record.path}${seen[record.path]}"


def _make_tensor(group: Any, name: str, record: TensorRecord, places: list[Place]) -> TensorRecord:
    offset = _make_dataset(group, name, stored_as(record), record.slab)
    places.append(Place(offset, record.size_bytes, record.offset))
    return msgspec.structs.replace(record, offset=offset)


def _make_bytes(group: Any, name: str, data: bytes, places: list[Place]) -> int:
    offset = _make_dataset(group, name, Stored(BYTE, (len(data),)))
    places.append(Place(offset, len(data), data=data))
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
