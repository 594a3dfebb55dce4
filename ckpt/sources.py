"""Where the bytes of a checkpoint are read from: an arena in memory, or shard files of a committed step.

Every block is verified as it is read. All raise CorruptCheckpoint for bytes that do not match their checksum, and
OSError for a device that fails.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from resilio_hpc.ckpt import arena
from resilio_hpc.ckpt.records import (
    BLOCK_BYTES,
    Layout,
    Manifest,
    RankRecord,
    Table,
    TensorRecord,
    blocks,
    read_table,
    sha256,
)
from resilio_hpc.core.errors import CorruptCheckpoint, LayoutMismatch
from resilio_hpc.native import copy_crc32c, crc32c, populate

POPULATE_BYTES = 1 << 20


class Source(Protocol):
    """One rank's state, to be read."""

    step: int
    tree: bytes
    tensors: Sequence[TensorRecord]

    def read(self, record: TensorRecord, start: int, target: memoryview) -> int:
        """Copy bytes of a tensor from ``start`` on into ``target`` (of up to one block); their CRC32C."""
        ...


def read_tensor(
    source: Source, record: TensorRecord, target: memoryview, pool: ThreadPoolExecutor
) -> list[Future[None]]:
    """Begin to read a whole tensor into ``target``, block by block, verified; wait for the futures' results."""
    if record.size_bytes <= BLOCK_BYTES // 4:
        _read_block(source, record, 0, target)
        return []
    return [
        pool.submit(_read_block, source, record, start, target[start : start + size])
        for start, size in blocks(record.size_bytes)
    ]


def _read_block(source: Source, record: TensorRecord, start: int, target: memoryview) -> None:
    if len(target) >= POPULATE_BYTES:
        populate(target)  # fresh pages all at once: faults one by one double the time of the copy
    if len(target) and source.read(record, start, target) != record.checksums[start // BLOCK_BYTES]:
        raise CorruptCheckpoint(f"step {source.step}: tensor {record.path} does not match its checksum at byte {start}")


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
        self._view = memoryview(self._map)
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
        return self._view[offset : offset + size]

    def read(self, record: TensorRecord, start: int, target: memoryview) -> int:
        """See Source."""
        return copy_crc32c(target, self.slice(record.offset + start, len(target)))

    def close(self) -> None:
        """Unmap."""
        self._view.release()
        try:
            self._map.close()
        except BufferError:
            pass  # a slice of it is still referred to (by a traceback): unmapped when that goes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class CommittedSource:
    """One rank's part of a committed step, read with plain positioned reads at the offsets of the tables."""

    def __init__(self, directory: Path, manifest: Manifest, rank: int, world_size: int, layout: Layout) -> None:
        """Raises LayoutMismatch when this step is not for such a world, CorruptCheckpoint, OSError."""
        self.step = manifest.step
        self._directory = directory
        self._files: dict[str, int] = {}
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
        fd = self._open(shard.file, shard.size_bytes)
        data = _pread(fd, record.table.offset, record.table.size_bytes)
        _check_table(data, record, shard.file)
        table = read_table(data, shard.size_bytes)
        tree = _pread(fd, table.tree.offset, table.tree.size_bytes)
        if crc32c(tree) != table.tree.crc32c:
            raise CorruptCheckpoint(f"{shard.file}: the tree of rank {rank} does not match its checksum")
        for tensor in table.tensors:
            self._where[tensor.path] = fd
        return table, tree

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

    def _open(self, name: str, size: int) -> int:
        if name not in self._files:
            try:
                fd = os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError as error:
                raise CorruptCheckpoint(f"{self._directory.name}/{name} is missing") from error
            self._files[name] = fd
            if os.fstat(fd).st_size != size:
                raise CorruptCheckpoint(f"{self._directory.name}/{name} does not have {size} bytes")
        return self._files[name]

    def read(self, record: TensorRecord, start: int, target: memoryview) -> int:
        """See Source."""
        _pread_into(self._where[record.path], record.offset + start, target)
        return crc32c(target)

    def close(self) -> None:
        """Close the files."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _check_table(data: bytes, record: RankRecord, file: str) -> None:
    if crc32c(data) != record.table.crc32c or sha256(data) != record.table_sha256:
        raise CorruptCheckpoint(f"{file}: the table of rank {record.rank} does not match its checksum")


def _pread(fd: int, offset: int, size: int) -> bytes:
    data = bytearray(size)
    _pread_into(fd, offset, memoryview(data))
    return bytes(data)


def _pread_into(fd: int, offset: int, target: memoryview) -> None:
    done = 0
    while done < len(target):
        count = os.preadv(fd, [target[done:]], offset + done)
        if count == 0:
            raise CorruptCheckpoint("a shard file ends too early")
        done += count
