"""Where the bytes of a checkpoint are read from: an arena in memory, or shard files of a committed step.

Every block is verified as it is read. All raise CorruptCheckpoint for bytes that do not match their checksum, and
OSError for a device that fails.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from resilio_hpc.ckpt import arena, bulk_io
from resilio_hpc.ckpt.bulk_io import Segment
from resilio_hpc.ckpt.records import (
    BLOCK_BYTES,
    Layout,
    Manifest,
    Table,
    TensorRecord,
    blocks,
    read_table,
)
from resilio_hpc.ckpt.shard_reader import ShardReader
from resilio_hpc.core.errors import CorruptCheckpoint, LayoutMismatch
from resilio_hpc.native import copy_crc32c, crc32c, populate

POPULATE_BYTES = 1 << 20
SHARE_BYTES = 256 << 20


Wanted = tuple[TensorRecord, memoryview]
"""A tensor, and the memory of its size that it goes to."""


class Source(Protocol):
    """One rank's state, to be read."""

    step: int
    tree: bytes
    tensors: Sequence[TensorRecord]

    def fill(self, wanted: Sequence[Wanted], pool: ThreadPoolExecutor) -> None:
        """Copy every wanted tensor whole into its target, verified. Nothing writes to a target after the return."""
        ...


class ArenaSource:
    """A snapshot in an arena, mapped read-only. The caller makes sure that nobody overwrites it (``arena.pin``)."""

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
        self._direct = alone or layout == "own"
        self._directory = directory
        self._files: dict[str, ShardReader] = {}
        self._where: dict[str, int] = {}
        try:
            if manifest.layout != layout:
                raise LayoutMismatch(
                    f"step {manifest.step} was saved with layout {manifest.layout!r}, this Checkpointer has {layout!r}"
                )
            if layout == "own" and manifest.world_size != world_size:
                raise LayoutMismatch(
                    f"step {manifest.step} was saved by {manifest.world_size} processes with tensors of their own and "
                    f"cannot be restored by {world_size}; start as many, or save with layout=REPLICATED"
                )
            # a replicated checkpoint fits any world: ranks beyond the old world take another rank's plain values
            table, self.tree = self._table(manifest, rank % manifest.world_size)
            self.tensors = self._resolve(manifest, table)
        except BaseException:
            self.close()
            raise

    def _table(self, manifest: Manifest, rank: int) -> tuple[Table, bytes]:
        shard, record = manifest.shard_of(rank)
        if shard.file not in self._files:
            self._files[shard.file] = ShardReader(self._directory, shard)
        reader = self._files[shard.file]
        table = reader.table(record)
        for tensor in table.tensors:
            self._where[tensor.path] = reader.fd
        return table, reader.tree(record, table)

    def _resolve(self, manifest: Manifest, table: Table) -> Sequence[TensorRecord]:
        """Replicated tensors have their bytes with rank 0, under the same path."""
        if all(record.offset >= 0 for record in table.tensors):
            return table.tensors
        held = {record.path: record for record in self._table(manifest, 0)[0].tensors}
        found = [record if record.offset >= 0 else held.get(record.path) for record in table.tensors]
        for mine, theirs in zip(table.tensors, found, strict=True):
            if theirs is None or theirs.offset < 0 or (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
                raise CorruptCheckpoint(f"step {self.step}: rank 0 holds no such tensor as {mine.path}")
        return [record for record in found if record is not None]

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


def _checksum(record: TensorRecord, start: int) -> int:
    return record.checksums[start // BLOCK_BYTES]


def _mismatch(step: int, record: TensorRecord, start: int) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"step {step}: tensor {record.path} does not match its checksum at byte {start}")


def _populate(target: memoryview) -> None:
    if len(target) >= POPULATE_BYTES:
        populate(target)  # fresh pages all at once: faults one by one double the time of the copy
