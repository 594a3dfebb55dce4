"""Reading a snapshot from an arena in memory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from resilio_hpc.ckpt.format.manifest import TensorRecord, read_table
from resilio_hpc.ckpt.format.source import Piece, Wanted, WantedSlab
from resilio_hpc.ckpt.restore.whole_reader import copy_whole
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.state.containers import NOTHING
from resilio_hpc.ckpt.state.slab import Box
from resilio_hpc.ckpt.store.posix import PosixFile
from resilio_hpc.core.errors import CorruptCheckpoint
from resilio_hpc.core.tiers import Tier
from resilio_hpc.native import crc32c, map_shared, populate

_NAMELESS_SAVES = 3


class Mappings:
    """Arenas that stay mapped from one save to the next: a new mapping takes longer than the copy."""

    def __init__(self) -> None:
        self._mapped: dict[tuple[int, int], tuple[Path, memoryview]] = {}  # by device and inode
        self._unused: Counter[tuple[int, int]] = Counter()  # number of saves in which it was not used

    def view(self, fd: int, path: Path, size: int) -> memoryview:
        """Return at least ``size`` bytes of the open file, mapped."""
        found = os.fstat(fd)
        file = (found.st_dev, found.st_ino)
        if file not in self._mapped or len(self._mapped[file][1]) < size:
            self._mapped[file] = path, _map(fd, found.st_size)
        self._unused[file] = 0
        return self._mapped[file][1]

    def known(self, fd: int) -> memoryview:
        """Return what is mapped of the open file, from its begin; nothing of one that is not mapped."""
        found = os.fstat(fd)
        return self._mapped.get((found.st_dev, found.st_ino), (None, memoryview(b"")))[1]

    def let_go(self) -> None:
        """Unmap, after a save, files that were removed or replaced, whose memory would stay in use.

        For a file without a name that is not known; it counts as replaced after some saves to others.
        """
        for file, (path, _) in list(self._mapped.items()):
            self._unused[file] += 1
            nameless = path.is_relative_to("/proc")
            if self._unused[file] > _NAMELESS_SAVES if nameless else not _is_at(path, file):
                del self._mapped[file], self._unused[file]


class ArenaSource:
    """A snapshot in an arena. The caller makes sure that no process overwrites it (``arena.pin``)."""

    is_foreign = False
    tier = Tier.MEMORY

    def __init__(self, path: Path, mappings: Mappings | None = None, memory: memoryview | None = None) -> None:
        """Open an arena; ``mappings``: keep its mapping beyond this object's life.

        ``memory``: the part of the arena that is mapped already, from its begin. Raises CorruptCheckpoint unless the
        arena holds a whole snapshot with a valid table.
        """
        self._path, self._mappings = path, mappings
        self._memory = memoryview(b"") if memory is None else memory
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CorruptCheckpoint(f"{path} cannot be opened: {error.strerror}") from error
        try:
            header = arena.header_of(descriptor)
            if header is None:
                raise CorruptCheckpoint(f"{path} holds no whole snapshot")
            self.header = header
            self._size = header.size_bytes  # of what lies in the arena
            self.step = header.step
            data = os.pread(descriptor, header.table_size, header.table_offset)
            if crc32c(data) != header.table_crc32c:
                raise CorruptCheckpoint(f"{path}: the table does not match its checksum")
            self.table = read_table(data, header.size_bytes)
            self.tensors: Sequence[TensorRecord] = self.table.tensors
            self.tree = os.pread(descriptor, self.table.tree.size_bytes, self.table.tree.offset)
            if crc32c(self.tree) != self.table.tree.crc32c:
                raise CorruptCheckpoint(f"{path}: the tree does not match its checksum")
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor, self.file = descriptor, PosixFile(descriptor)

    @cached_property
    def view(self) -> memoryview:
        """Return all bytes of the arena, neither copied nor verified."""
        if self._mappings is not None:
            return self._mappings.view(self._descriptor, self._path, self._size)[: self._size]
        return _map(self._descriptor, self._size)

    def slice(self, offset: int, size: int) -> memoryview:
        """Return some of them."""
        return self.view[offset : offset + size]

    def fill(self, wanted: Sequence[Wanted], pool: ThreadPoolExecutor) -> None:
        """See Source. Of an arena that is not mapped each thread maps what it copies: sooner than to read it."""
        memory = self._memory
        if self._mappings is not None and len(known := self._mappings.known(self._descriptor)) > len(memory):
            memory = known
        mapped = [each for each in wanted if each[0].offset + each[0].size_bytes <= len(memory)]
        others = [each for each in wanted if each[0].offset + each[0].size_bytes > len(memory)]
        copy_whole(self.step, memory, mapped, pool)
        if others:
            copy_whole(self.step, map_shared(self._descriptor, self._size, False), others, pool, fresh=True)

    def find(self, record: TensorRecord, box: Box) -> Sequence[Piece]:
        """See Source: snapshots of other ranks are not available here."""
        raise CorruptCheckpoint(
            f"the snapshot in memory holds {list(record.shape)} of {record.path}, and another part of it is wanted"
        )

    def elsewhere(self, path: Sequence[Any]) -> Any:
        """See Source: snapshots of other ranks are not available here."""
        return NOTHING

    def is_the_same_everywhere(self, record: TensorRecord) -> bool:
        """See Source: not known here."""
        return False

    def fill_slabs(self, wanted: Sequence[WantedSlab], pool: ThreadPoolExecutor) -> None:
        """See Source; ``find`` found none."""

    def close(self) -> None:
        """Close; the memory is unmapped with its last slice."""
        self.__dict__.pop("view", None)
        self._memory.release()
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _is_at(path: Path, file: tuple[int, int]) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == file


def _map(fd: int, size: int) -> memoryview:
    view = map_shared(fd, size, False)
    populate(view)  # faults one by one would cost seven times the copy
    return view
