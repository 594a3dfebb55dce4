"""The HDF5 metadata of a shard file, made by h5py; all other bytes are written at the offsets of its datasets.

Dataset ``/rank<R>/<path of the tensor>`` for each tensor, contiguous; ``/rank<R>/$tree`` and ``/rank<R>/$table`` (JSON
as bytes, padded with spaces) for the plain values and the table. The attribute ``dtype`` names a dtype that HDF5 lacks:
see ``stored_types``.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import msgspec
from typing_extensions import Self

from resilio_hpc.ckpt.format.dataset_names import dataset_names
from resilio_hpc.ckpt.format.extents import gaps, hash_gaps
from resilio_hpc.ckpt.format.files import NewFile
from resilio_hpc.ckpt.format.hdf_group import HdfGroup, hdf_file
from resilio_hpc.ckpt.format.manifest import Extent, Layout, RankRecord, RankTable, TensorRecord, sha256
from resilio_hpc.ckpt.format.stored_types import BYTE, Stored, stored_as
from resilio_hpc.native import crc32c

_PIECE_BYTES = 1 << 20
Tensors = tuple[tuple[Any, ...], ...]
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class RankPart:
    """One rank's part of the file.

    ``offset`` of its tensors: where their bytes are now. ``own``: the numbers of the replicated ones that it writes
    too, since they differ from those of rank 0.
    """

    step: int
    rank: int
    layout: Layout
    tree: bytes
    tensors: Sequence[TensorRecord]
    own: frozenset[int] = frozenset()


@dataclass(frozen=True)
class FilePlace:
    """A copy into the file: ``size`` bytes from ``start`` of an arena, or ``data``, to ``offset`` of the file."""

    offset: int
    size: int
    start: int = 0
    data: bytes | None = None


class HdfImage:
    """An HDF5 file in memory that holds only metadata, with a hole for each tensor, tree and table.

    libhdf5 never writes to the disk: it does not handle errors of a disk well, and h5py keeps the interpreter locked
    while libhdf5 waits, so a file system that hangs would stop training.
    """

    def __init__(self, parts: Sequence[RankPart]) -> None:
        """Make the image. ``places``: of each rank, what goes where, tree and table last.

        ``slabs``: see ``manifest.Checks``. Raises OSError.
        """
        self.places: list[list[FilePlace]] = []
        self.ranks: list[RankRecord] = []
        try:
            self._skeleton = self._take_kept(parts) or self._make(parts)
        except (RuntimeError, ValueError) as error:  # h5py reports errors of libhdf5 by these
            raise OSError(errno.ENOMEM, f"libhdf5: {error}") from error
        self._fd = self._skeleton.fd
        self.slabs = self._skeleton.slabs
        self.size_bytes = os.fstat(self._fd).st_size

    def _take_kept(self, parts: Sequence[RankPart]) -> _Skeleton | None:
        """Return the former save's, if this one has the same tensors and its tree and table fit."""
        try:
            skeleton = _kept.pop()
        except IndexError:
            return None
        if skeleton.tensors != _tensors(parts):
            return None
        for part, room in zip(parts, skeleton.rooms, strict=True):
            if not self._fill(part, room):
                self.places.clear()
                self.ranks.clear()
                return None
        with hdf_file(skeleton.fd, "r+") as file:
            file.attrs.modify("step", parts[0].step)
        return skeleton

    def _make(self, parts: Sequence[RankPart]) -> _Skeleton:
        skeleton = _Skeleton(os.memfd_create("resilio-hdf5", os.MFD_CLOEXEC), _tensors(parts))
        with hdf_file(skeleton.fd, "w") as file:
            file.attrs["format"] = "resilio-checkpoint"
            file.attrs["step"] = parts[0].step
            for part in parts:
                room = _make_room(HdfGroup(file.id, f"rank{part.rank}"), part)
                skeleton.rooms.append(room)
                is_filled = self._fill(part, room)
                assert is_filled
        return skeleton

    def _fill(self, part: RankPart, room: _Room) -> bool:
        """Place everything of this rank; return False when its tree or table is too long."""
        tree = _padded(part.tree, room.tree)
        table = _padded(_table(part, room), room.table)
        if tree is None or table is None:
            return False
        places = [
            FilePlace(offset, record.size_bytes, record.offset)
            for record, offset in zip(part.tensors, room.tensors, strict=True)
            if offset >= 0
        ]
        ends = [FilePlace(room.tree.offset, len(tree), data=tree), FilePlace(room.table.offset, len(table), data=table)]
        self.places.append([*places, *ends])
        extent = Extent(room.table.offset, len(table), crc32c(table))
        self.ranks.append(RankRecord(part.rank, extent, sha256(table)))
        return True

    def write(self, file: NewFile) -> str:
        """Give a file its final size and write the metadata; return the metadata's hash. Raises OSError.

        In a recycled file, the gaps between the tensors are overwritten too.
        """
        extents = [(place.offset, place.size) for places in self.places for place in places]
        file.allocate(self.size_bytes)
        for start, size in _pieces(gaps(extents, self.size_bytes)) if file.is_recycled else self._data():
            file.write_small(memoryview(os.pread(self._fd, size, start)), start)
        return hash_gaps(file, extents, self.size_bytes)

    def _data(self) -> Iterator[tuple[int, int]]:
        """Yield (start, size) of everything that is not a hole, in pieces."""
        yield from _pieces(self._runs())

    def _runs(self) -> Iterator[tuple[int, int]]:
        end = 0
        while end < self.size_bytes:
            try:
                at = os.lseek(self._fd, end, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # only a hole until the end
                    return
                raise
            end = os.lseek(self._fd, at, os.SEEK_HOLE)
            yield at, end - at

    def close(self) -> None:
        """Keep it for the next save."""
        _kept[:] = [self._skeleton]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True)
class _Hole:
    """Space in the file for a tree or a table, padded with spaces."""

    offset: int
    size: int


@dataclass(frozen=True)
class _Room:
    """Where a rank's tensors begin in the file (-1: another rank's copy is written)."""

    tensors: tuple[int, ...]
    tree: _Hole
    table: _Hole


class _Skeleton:
    """The file in memory, and the tensors it was made for.

    h5py takes 0.1 ms for each, so it is kept for later saves.
    """

    def __init__(self, fd: int, tensors: Tensors) -> None:
        self.fd, self.tensors = fd, tensors
        slabs = [(rank, one) for rank, _, _, *records in tensors for one in records if one[-1] is not None]
        self.slabs = sha256(_encode(slabs)) if slabs else ""
        self.rooms: list[_Room] = []
        weakref.finalize(self, os.close, fd)


_kept: list[_Skeleton] = []
"""Of the last save, or of none; the caller that pops it has it alone."""
os.register_at_fork(after_in_child=_kept.clear)  # it is the parent's file


def _pieces(runs: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for at, size in runs:
        for start in range(at, at + size, _PIECE_BYTES):
            yield start, min(_PIECE_BYTES, at + size - start)


def _tensors(parts: Sequence[RankPart]) -> Tensors:
    return tuple(
        (
            part.rank,
            part.layout,
            part.own,
            *((one.path, one.kind, one.dtype, one.shape, one.slab) for one in part.tensors),
        )
        for part in parts
    )


def _padded(data: bytes, hole: _Hole) -> bytes | None:
    return data.ljust(hole.size) if len(data) <= hole.size else None


def _table(part: RankPart, room: _Room) -> bytes:
    records = tuple(
        msgspec.structs.replace(record, offset=offset, checksums=record.checksums if offset >= 0 else ())
        for record, offset in zip(part.tensors, room.tensors, strict=True)
    )
    tree = part.tree.ljust(room.tree.size)
    return _encode(RankTable(Extent(room.tree.offset, len(tree), crc32c(tree)), records))


def _make_room(group: HdfGroup, part: RankPart) -> _Room:
    mine = part.layout == "own" or part.rank == 0
    tensors = tuple(
        group.make_dataset(name, stored_as(record), record.slab)
        if (mine or number in part.own if record.slab is None else record.slab.replica == 0)
        else -1
        for number, (record, name) in enumerate(zip(part.tensors, dataset_names(part.tensors), strict=True))
    )
    tree = _make_hole(group, "$tree", len(part.tree))
    table = _table(part, _Room(tensors, tree, _Hole(0, 0)))
    return _Room(tensors, tree, _make_hole(group, "$table", len(table)))


def _make_hole(group: HdfGroup, name: str, size: int) -> _Hole:
    """Make a hole with some room to grow: later numbers may have more digits."""
    size += size // 64 + 64
    return _Hole(group.make_dataset(name, Stored(BYTE, (size,))), size)
