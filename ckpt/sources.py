"""Where the bytes of a checkpoint are read from: an arena in memory, or shard files of a committed step.

Every block is verified as it is read. All raise CorruptCheckpoint for bytes that do not match their checksum, and
OSError for a device that fails.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import combinations
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from resilio_hpc.ckpt import arena, bulk_io
from resilio_hpc.ckpt.bulk_io import Segment
from resilio_hpc.ckpt.records import (
    BLOCK_BYTES,
    Layout,
    Manifest,
    RankRecord,
    Table,
    TensorRecord,
    blocks,
    read_table,
)
from resilio_hpc.ckpt.shard_reader import ShardReader
from resilio_hpc.ckpt.slab import Box, Shape
from resilio_hpc.ckpt.slab_reader import Part, SlabReader
from resilio_hpc.core.errors import CorruptCheckpoint, LayoutMismatch
from resilio_hpc.native import copy_crc32c, crc32c, populate

POPULATE_BYTES = 1 << 20
SHARE_BYTES = 256 << 20
_SLAB_READERS = 2


Wanted = tuple[TensorRecord, memoryview]
"""A tensor, and the memory of its size that it goes to."""


class Piece(NamedTuple):
    """``box`` of a saved tensor goes to the equally large box that begins at ``start`` of a wanted one."""

    fd: int
    record: TensorRecord
    box: Box
    start: Shape


WantedSlab = tuple[Sequence[Piece], memoryview, Shape]
"""Where the bytes of a tensor are, the memory of its size that they go to, and its shape."""


class Source(Protocol):
    """One rank's state, to be read. ``is_foreign``: as another number of processes saved it."""

    step: int
    tree: bytes
    tensors: Sequence[TensorRecord]
    is_foreign: bool

    def find(self, record: TensorRecord, box: Box) -> Sequence[Piece]:
        """Where ``box`` of the global tensor that ``record`` is a part of lies, whoever saved it.

        Raises LayoutMismatch when the checkpoint does not hold all of it, CorruptCheckpoint when it holds some twice.
        """
        ...

    def is_the_same_everywhere(self, record: TensorRecord) -> bool:
        """Did every process save the same plain tensor under this path?"""
        ...

    def fill_slabs(self, wanted: Sequence[WantedSlab], pool: ThreadPoolExecutor) -> None:
        """As ``fill``, from pieces."""
        ...

    def fill(self, wanted: Sequence[Wanted], pool: ThreadPoolExecutor) -> None:
        """Copy every wanted tensor whole into its target, verified. Nothing writes to a target after the return."""
        ...


class ArenaSource:
    """A snapshot in an arena, mapped read-only. The caller makes sure that nobody overwrites it (``arena.pin``)."""

    is_foreign = False

    def __init__(self, path: Path) -> None:
        """Raises CorruptCheckpoint unless the arena holds a whole snapshot with a right table."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CorruptCheckpoint(f"{path} cannot be opened: {error.strerror}") from error
        try:
            header = arena.header_of(fd)
            if header is None:
                raise CorruptCheckpoint(f"{path} holds no whole snapshot")
            self.header = header
            self.step = header.step
            # populated at once: faults one by one cost seven times the copy
            self._map = mmap.mmap(fd, header.size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self.view = memoryview(self._map)
        try:
            data = self.slice(header.table_offset, header.table_size)
            if crc32c(data) != header.table_crc32c:
                raise CorruptCheckpoint(f"{path}: the table does not match its checksum")
            self.table = read_table(bytes(data), header.size_bytes)
            self.tensors: Sequence[TensorRecord] = self.table.tensors
            self.tree = bytes(self.slice(self.table.tree.offset, self.table.tree.size_bytes))
            if crc32c(self.tree) != self.table.tree.crc32c:
                raise CorruptCheckpoint(f"{path}: the tree does not match its checksum")
        except BaseException:
            self.close()
            raise

    def slice(self, offset: int, size: int) -> memoryview:
        """Bytes of the arena, not copied and not verified."""
        return self.view[offset : offset + size]

    def fill(self, wanted: Sequence[Wanted], pool: ThreadPoolExecutor) -> None:
        """See Source. Small tensors are copied here: to hand them on costs more."""

        def copy(record: TensorRecord, target: memoryview, start: int) -> None:
            _populate(target)
            if copy_crc32c(target, self.slice(record.offset + start, len(target))) != _checksum(record, start):
                raise _mismatch(self.step, record, start)

        pending = []
        try:
            for record, target in wanted:
                for start, size in blocks(record.size_bytes):
                    part = target[start : start + size]
                    if record.size_bytes <= BLOCK_BYTES // 4:
                        copy(record, part, start)
                    else:
                        pending.append(pool.submit(copy, record, part, start))
        finally:
            wait(pending)
        for future in pending:
            future.result()

    def find(self, record: TensorRecord, box: Box) -> Sequence[Piece]:
        """See Source: what other ranks hold in memory cannot be had here."""
        raise CorruptCheckpoint(
            f"the snapshot in memory holds {list(record.shape)} of {record.path}, and another part of it is wanted"
        )

    def is_the_same_everywhere(self, record: TensorRecord) -> bool:
        """See Source: not known here."""
        return False

    def fill_slabs(self, wanted: Sequence[WantedSlab], pool: ThreadPoolExecutor) -> None:
        """See Source; ``find`` found none."""

    def close(self) -> None:
        """Unmap."""
        self.view.release()
        try:
            self._map.close()
        except BufferError:
            pass  # a slice of it is still referred to (by a traceback): unmapped when that goes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class _Part(NamedTuple):
    """A block of a tensor in a file."""

    fd: int
    offset: int
    target: memoryview
    record: TensorRecord
    start: int


def _shares(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """What a thread reads in one go: neighbours in one file, up to SHARE_BYTES."""
    share: list[_Part] = []
    for part in parts:
        if share and (part.fd != share[0].fd or part.offset - share[0].offset > SHARE_BYTES):
            yield share
            share = []
        share.append(part)
    if share:
        yield share


class CommittedSource:
    """One rank's part of a committed step, read at the offsets of the tables."""

    def __init__(
        self, directory: Path, manifest: Manifest, rank: int, world_size: int, layout: Layout, alone: bool = True
    ) -> None:
        """``alone`` False: other ranks of this node read the same bytes.

        Raises LayoutMismatch when this step is not for such a world, CorruptCheckpoint, OSError.
        """
        self.step = manifest.step
        self.is_foreign = layout == "own" and manifest.world_size != world_size
        self._manifest = manifest
        self._alone = alone
        self._direct = alone or layout == "own"
        self._directory = directory
        self._all: dict[str, list[tuple[int, TensorRecord]]] | None = None
        self._files: dict[str, ShardReader] = {}
        self._where: dict[str, int] = {}
        try:
            if manifest.layout != layout:
                raise LayoutMismatch(
                    f"step {manifest.step} was saved with layout {manifest.layout!r}, this Checkpointer has {layout!r}"
                )
            # for another world: ranks beyond the old one take another rank's plain values
            reader, record = self._reader(rank % manifest.world_size)
            table = reader.table(record)
            if self.is_foreign and all(tensor.slab is None for tensor in table.tensors):
                raise LayoutMismatch(
                    f"step {manifest.step} was saved by {manifest.world_size} processes with tensors of their own and "
                    f"cannot be restored by {world_size}; start as many, or save with layout=REPLICATED, or say with "
                    "Slab or DTensor which part of a tensor each process holds"
                )
            self.tree = reader.tree(record, table)
            self.tensors = self._resolve(reader, table)
        except BaseException:
            self.close()
            raise

    def _reader(self, rank: int) -> tuple[ShardReader, RankRecord]:
        shard, record = self._manifest.shard_of(rank)
        if shard.file not in self._files:
            self._files[shard.file] = ShardReader(self._directory, shard)
        return self._files[shard.file], record

    def _resolve(self, reader: ShardReader, table: Table) -> Sequence[TensorRecord]:
        """Replicated tensors have their bytes with rank 0, under the same path; slabs are looked for when wanted."""
        self._where = {record.path: reader.fd for record in table.tensors}
        if all(record.offset >= 0 or record.slab for record in table.tensors):
            return table.tensors
        first, record_of_first = self._reader(0)
        held = {record.path: record for record in first.table(record_of_first).tensors if record.slab is None}
        found: list[TensorRecord] = []
        for mine in table.tensors:
            theirs = held.get(mine.path) if mine.offset < 0 and mine.slab is None else mine
            if theirs is None or (theirs.offset < 0 and theirs.slab is None) or _kind(mine) != _kind(theirs):
                raise CorruptCheckpoint(f"step {self.step}: rank 0 holds no such tensor as {mine.path}")
            if theirs is not mine:
                self._where[mine.path] = first.fd
            found.append(theirs)
        return found

    def find(self, record: TensorRecord, box: Box) -> Sequence[Piece]:
        """See Source. Reads the tables of all ranks, once."""
        pieces: dict[Box, Piece] = {}
        for fd, held in self._everywhere().get(record.path, []):
            if held.slab is None and self._manifest.layout == "own":
                raise LayoutMismatch(f"step {self.step}: {record.path} was saved in parts, and as a whole")
            if (held.kind, held.dtype, _global_shape(held)) != (record.kind, record.dtype, _global_shape(record)):
                raise CorruptCheckpoint(f"step {self.step}: the ranks' parts of {record.path} are of different tensors")
            start = held.slab.start if held.slab is not None else (0,) * len(held.shape)
            common = box.intersect(Box(start, held.shape))
            if common is None:
                continue
            piece = Piece(fd, held, common.seen_from(start), common.seen_from(box.start).start)
            first = pieces.setdefault(common, piece).record
            if (first.slab, first.checksums) != (held.slab, held.checksums):
                raise CorruptCheckpoint(f"step {self.step}: two ranks saved the same part of {record.path} differently")
        self._check_cover(record.path, box, list(pieces.values()))
        return list(pieces.values())

    def is_the_same_everywhere(self, record: TensorRecord) -> bool:
        """See Source: by the checksums."""
        copies = [held for _, held in self._everywhere().get(record.path, [])]
        return len(copies) == self._manifest.world_size and all(
            held.slab is None and _kind(held) == _kind(record) and held.checksums == record.checksums for held in copies
        )

    def _everywhere(self) -> Mapping[str, Sequence[tuple[int, TensorRecord]]]:
        """What lies on disk under each path, of all ranks."""
        if self._all is None:
            self._all = defaultdict(list)
            for rank in range(self._manifest.world_size):
                reader, record = self._reader(rank)
                for held in reader.table(record).tensors:
                    if held.offset >= 0:
                        self._all[held.path].append((reader.fd, held))
        return self._all

    def _check_cover(self, path: str, box: Box, pieces: Sequence[Piece]) -> None:
        boxes = [Box(piece.start, piece.box.shape) for piece in pieces]
        for one, other in combinations(boxes, 2):
            if one.intersect(other) is not None:
                raise CorruptCheckpoint(f"step {self.step}: the parts of {path} that two ranks saved overlap")
        held = sum(piece.box.size for piece in pieces)
        if held != box.size:
            raise LayoutMismatch(f"step {self.step} holds {held} of the {box.size} elements of {path} that are wanted")

    def fill_slabs(self, wanted: Sequence[WantedSlab], pool: ThreadPoolExecutor) -> None:
        """See Source. Two at a time: each has room for two blocks."""
        parts = [
            Part(piece.fd, piece.record, piece.box, target, shape, piece.start)
            for pieces, target, shape in wanted
            for piece in pieces
        ]
        parts.sort(key=lambda part: (part.fd, part.record.offset), reverse=True)
        lock = threading.Lock()

        def read() -> None:
            reader = SlabReader(self.step, self._alone)
            while True:
                with lock:
                    if not parts:
                        return
                    part = parts.pop()
                reader.read(part)

        pending = [pool.submit(read) for _ in range(min(_SLAB_READERS, len(parts)))]
        wait(pending)
        for future in pending:
            future.result()

    def fill(self, wanted: Sequence[Wanted], pool: ThreadPoolExecutor) -> None:
        """See Source. In the order of the files, each thread a part of its own."""
        parts = [
            _Part(self._where[record.path], record.offset + start, target[start : start + size], record, start)
            for record, target in wanted
            for start, size in blocks(record.size_bytes)
        ]

        def read(share: list[_Part]) -> None:
            for part in share:
                _populate(part.target)
            segments = [Segment(part.offset, part.target, _checksum(part.record, part.start)) for part in share]
            for bad in bulk_io.read(share[0].fd, segments, self._direct):
                raise _mismatch(self.step, share[bad].record, share[bad].start)

        pending = [pool.submit(read, share) for share in _shares(sorted(parts, key=lambda part: part[:2]))]
        wait(pending)
        for future in pending:
            future.result()

    def close(self) -> None:
        """Close the files."""
        for reader in self._files.values():
            reader.close()
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _kind(record: TensorRecord) -> tuple[str, Shape]:
    return record.dtype, record.shape


def _global_shape(record: TensorRecord) -> Shape:
    return record.shape if record.slab is None else record.slab.global_shape


def _checksum(record: TensorRecord, start: int) -> int:
    return record.checksums[start // BLOCK_BYTES]


def _mismatch(step: int, record: TensorRecord, start: int) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"step {step}: tensor {record.path} does not match its checksum at byte {start}")


def _populate(target: memoryview) -> None:
    if len(target) >= POPULATE_BYTES:
        populate(target)  # fresh pages all at once: faults one by one double the time of the copy
