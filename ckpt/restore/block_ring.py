"""The ring in shared memory of ``shared_blocks``: slots for blocks, and a table of their contents."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from resilio_hpc.ckpt.format.bulk_io import BoxSegment, Segment, size_of
from resilio_hpc.ckpt.format.files import ReadFile
from resilio_hpc.ckpt.format.manifest import BLOCK_BYTES
from resilio_hpc.ckpt.format.pages import HUGE_PAGE, PAGE
from resilio_hpc.ckpt.restore import block_table
from resilio_hpc.ckpt.restore.block_table import BATCH, LIMITS, BlockTable, Claim, Key, Reader, RingLimits
from resilio_hpc.ckpt.restore.table_lock import POLL_S, locked
from resilio_hpc.core.memory_left import refuse_to_fill_memory
from resilio_hpc.native import copy_crc32c, direct_io, map_shared

_GAP_BYTES = 64 << 10  # blocks with a larger gap between them are not read with one call

Fetch = Callable[[memoryview, int], None]
"""Fills the memory with the bytes from that offset on. Raises OSError."""


class Ring:
    """The slots and their table.

    Every user of its file holds a lock of it (flock). A slot is used again only once no process writes to it any more.
    The slot of a reader that did not finish is not used again.
    """

    def __init__(self, path: Path, limits: RingLimits = LIMITS) -> None:
        """Open or make the ring. Raises OSError."""
        self._path, self._limits = path, limits
        size = size_bytes(limits)
        self._rooms = threading.local()
        self._fd = self._open()
        try:
            with locked(self._fd, limits.lock_patience_s):
                if os.fstat(self._fd).st_size < size:
                    refuse_to_fill_memory(size)
                os.posix_fallocate(self._fd, 0, block_table.BYTES)  # the maker may have been killed before
                os.ftruncate(self._fd, size)
                self._memory = map_shared(self._fd, size, True)
            self.table = BlockTable(self._memory, self._fd, limits)
        except BaseException:
            remove_if_unused(self._fd, self._path)
            os.close(self._fd)
            raise

    def _open(self) -> int:
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                    raise PermissionError(errno.EPERM, "it is not ours alone", str(self._path))
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if _is_at(fd, self._path):
                    return fd
            except BlockingIOError:
                time.sleep(POLL_S)  # another process is about to remove it
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def read(
        self,
        file: ReadFile,
        segments: Sequence[Segment | BoxSegment],
        fetch: Fetch | None = None,
        ahead: Sequence[Segment | BoxSegment] = (),
    ) -> list[int]:
        """Return the indices of segments to read from the file: they did not match, or the ring was of no use.

        ``fetch``: reads the file's bytes, but from elsewhere. ``ahead``: segments needed soon; this thread reads them
        instead of waiting for others.
        """
        fetch = fetch or partial(self._read_file, file)
        wanted, coming = _keys(file, segments), _keys(file, ahead)
        rest: list[int] = []
        reader = Reader()
        patient_until = self._patient_until()
        with contextlib.suppress(OSError):  # TimeoutError is an OSError too
            while wanted and time.monotonic() < patient_until:
                look = self.table.look(wanted, reader)
                here, mine = look.here, look.mine
                if mine:
                    here |= self._fill(fetch, mine, segments)
                copied = self._copied(here, segments) if here else set()
                rest += [index for index in here.keys() | mine.keys() if index not in copied]
                wanted = {index: key for index, key in wanted.items() if index not in here and index not in mine}
                if here or mine:
                    patient_until = self._patient_until()
                elif coming and (early := self.table.look_ahead(coming)):
                    self._fill(fetch, early, ahead)
                    coming = {index: key for index, key in coming.items() if index not in early}
                else:
                    self.table.await_change(look)
        self.table.leave(reader)
        return sorted([*rest, *wanted])

    def _patient_until(self) -> float:
        return time.monotonic() + 3 * self._limits.patience_s

    def _read_file(self, file: ReadFile, room: memoryview, begin: int) -> None:
        """Read whole pages of the file to the begin of ``room``, which belongs to this thread."""
        pages = self._room()[: (len(room) + PAGE - 1) & -PAGE]
        if file.read_pages(pages, begin) < len(room):
            raise OSError(errno.ENODATA, "the file ends too early")

    def _fill(
        self, fetch: Fetch, mine: Mapping[int, Claim], segments: Sequence[Segment | BoxSegment]
    ) -> dict[int, Claim]:
        """Read ``mine``, neighbours with one call; return those that match their checksums.

        Raises OSError: out of memory.
        """
        filled: dict[int, Claim] = {}
        try:
            for claim in mine.values():
                if claim.is_new:  # small pages: gathering huge ones would take longer
                    os.posix_fallocate(self._fd, self._start(claim.slot), BLOCK_BYTES)
            for run in _runs([(segments[index].offset, size_of(segments[index]), index) for index in mine]):
                begin = run[0][0] & -PAGE
                needed = run[-1][0] + run[-1][1] - begin
                with contextlib.suppress(OSError):  # the reader of the file will report it
                    fetch(self._room()[:needed], begin)
                    for offset, size, index in run:
                        start, data = self._start(mine[index].slot), offset - begin
                        slot = self._memory[start : start + size]
                        if copy_crc32c(slot, self._room()[data : data + size]) == segments[index].crc32c:
                            filled[index] = mine[index]
        finally:
            self.table.release(mine, filled)
        return filled

    def _room(self) -> memoryview:
        """Return this thread's buffer, in large pages, since a device gets a request for each page."""
        if not hasattr(self._rooms, "memory"):
            size = BATCH * (BLOCK_BYTES + _GAP_BYTES) + 2 * PAGE
            room = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):
                room.madvise(mmap.MADV_HUGEPAGE)
            first = -ctypes.addressof(ctypes.c_char.from_buffer(room)) % HUGE_PAGE
            self._rooms.memory = memoryview(room)[first : first + size]
        memory: memoryview = self._rooms.memory
        return memory

    def _start(self, slot: int) -> int:
        return block_table.BYTES + slot * BLOCK_BYTES

    def _copied(self, here: Mapping[int, Claim], segments: Sequence[Segment | BoxSegment]) -> set[int]:
        """Copy segments to their targets; return those whose slot still held the block after the copy."""
        order = sorted(here, key=lambda index: here[index].slot)
        moved = [segments[index]._replace(offset=self._start(here[index].slot)) for index in order]
        direct_io.copy_segments(self._memory, moved)
        return {index for index in order if self.table.entry(here[index].slot).token == here[index].token}

    def close(self) -> None:
        """Leave the ring; the last process removes the file."""
        remove_if_unused(self._fd, self._path)
        self._memory.release()
        os.close(self._fd)


def size_bytes(limits: RingLimits) -> int:
    """Return the size of a ring's file."""
    return block_table.BYTES + limits.slots * BLOCK_BYTES


def _keys(file: ReadFile, segments: Sequence[Segment | BoxSegment]) -> dict[int, Key]:
    return {
        index: (*file.identity, segment.offset, segment.crc32c & 0xFFFFFFFF) for index, segment in enumerate(segments)
    }


def _runs(blocks: Sequence[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Return (offset, size, ...) of blocks, by offset, in groups that are read with one call."""
    runs: list[list[tuple[int, int, int]]] = []
    for block in blocks:
        if runs and block[0] - sum(runs[-1][-1][:2]) <= _GAP_BYTES:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def is_unused(fd: int, path: Path) -> bool:
    """Return whether it is this user's ring file, and no process uses it; then it is locked. Raises nothing."""
    with contextlib.suppress(OSError):
        status = os.fstat(fd)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _is_at(fd, path) and status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode)
    return False


def remove_if_unused(fd: int, path: Path) -> bool:
    """Remove this user's ring file if no process uses it; return whether it did. Raises nothing."""
    with contextlib.suppress(OSError):
        if is_unused(fd, path):
            path.unlink()
            return True
    return False


def _is_at(fd: int, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(fd), path.lstat())
    return False
