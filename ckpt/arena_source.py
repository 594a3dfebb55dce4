"""Reading a snapshot from an arena in memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from resilio_hpc.ckpt import arena, tree
from resilio_hpc.ckpt.records import BLOCK_BYTES, TensorRecord, blocks, read_table
from resilio_hpc.ckpt.slab import Box
from resilio_hpc.ckpt.source import Piece, Wanted, WantedSlab, checksum_at, mismatch, populate_large
from resilio_hpc.core.errors import CorruptCheckpoint
from resilio_hpc.native import copy_crc32c, crc32c


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
            populate_large(target)
            if copy_crc32c(target, self.slice(record.offset + start, len(target))) != checksum_at(record, start):
                raise mismatch(self.step, record, start)

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

    def elsewhere(self, path: Sequence[Any]) -> Any:
        """See Source: others' snapshots are not here."""
        return tree.NOTHING

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
