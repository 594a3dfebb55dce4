"""The ring in shared memory of ``shared_blocks``: slots for blocks, and a table of what is in them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from resilio_hpc.ckpt.arena import PAGE
from resilio_hpc.ckpt.bulk_io import BoxSegment, Segment, size_of
from resilio_hpc.ckpt.huge_memory import HUGE_PAGE
from resilio_hpc.ckpt.records import BLOCK_BYTES
from resilio_hpc.core.memory_left import refuse_to_fill_memory
from resilio_hpc.native import copy_crc32c, direct_io, map_shared

SLOTS = 64
_BATCH = 4  # blocks that a process reads in one go: what the disk likes to get
_GAP_BYTES = 64 << 10  # between two blocks that are still read in one go
_PATIENCE_S = 2.0  # then a block that somebody else reads is read here, too
_LOCK_PATIENCE_S = 1.0  # who holds the lock does nothing but look into the table; this one was stopped
_POLL_S = 0.0002
_HEADER = struct.Struct("=QQ")  # the slot to be used next; how often the table was changed
_CLAIMED, _KEY = struct.Struct("=Q"), struct.Struct("=QQQQ")
_ENTRY = struct.Struct("=QQQQQQ")  # written in this order, whose writer may be killed within it
_WORDS = _ENTRY.size // 8
_TABLE_BYTES, _BYTES = PAGE, PAGE + SLOTS * BLOCK_BYTES

Fetch = Callable[[memoryview, int], None]
"""Fills the memory with the bytes from that offset on. Raises OSError."""
_Key = tuple[int, int, int, int]
"""A block: device, inode, offset, checksum."""


class _Entry(NamedTuple):
    """What a slot has. ``claimed``: since when (CLOCK_MONOTONIC, ns) somebody has been reading it; 0: it is there.
    ``token``: another one each time."""

    claimed: int
    token: int
    key: _Key


class _Claim(NamedTuple):
    """A slot with a certain content."""

    slot: int
    token: int


_NOTHING: _Key = (0, 0, 0, 0)


class Ring:
    """The slots, and a table of what is in them.

    All who use its file hold a lock of it (flock). Another lock, of a byte, guards the table; a mutex keeps the threads
    of a ring apart. A slot is used again only once it is known that nobody writes to it any more: that of a reader who
    did not come to an end is given up.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError where it cannot be had."""
        self._path = path
        self._mutex = threading.Lock()
        self._rooms = threading.local()
        self._files: dict[tuple[int, int, int], int] = {}
        self._fd = self._open()
        try:
            with self._locked():
                is_whole = os.fstat(self._fd).st_blocks * 512 >= _BYTES  # who made it may have been killed
                if not is_whole:
                    refuse_to_fill_memory(_BYTES)
                    os.posix_fallocate(self._fd, 0, _BYTES)  # of small pages: to gather huge ones would take longer
                self._memory = map_shared(self._fd, _BYTES, True)
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
                time.sleep(_POLL_S)  # somebody is about to remove it
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Raises TimeoutError."""
        deadline = time.monotonic() + _LOCK_PATIENCE_S
        with self._mutex:
            while True:
                try:
                    _lock_table(self._fd, fcntl.F_WRLCK)
                    break
                except (BlockingIOError, PermissionError):
                    if time.monotonic() > deadline:
                        raise TimeoutError("a process that shares blocks does not let go of their table") from None
                    time.sleep(_POLL_S)
            try:
                yield
            finally:
                _lock_table(self._fd, fcntl.F_UNLCK)

    def read(self, fd: int, segments: Sequence[Segment | BoxSegment], fetch: Fetch | None = None) -> list[int]:
        """The indices of those that are to be read from the file: they did not match, or the ring was of no use.

        ``fetch``: reads what the file has, but from elsewhere."""
        status = os.fstat(fd)
        fetch = fetch or partial(self._read_file, self._direct(fd, status))
        wanted: dict[int, _Key] = {
            index: (status.st_dev, status.st_ino, segment.offset, segment.crc32c & 0xFFFFFFFF)
            for index, segment in enumerate(segments)
        }
        rest: list[int] = []
        patient_until = _patient_until()
        with contextlib.suppress(TimeoutError):
            while wanted and time.monotonic() < patient_until:
                here, mine, seen = self._look(wanted)
                if mine:
                    here |= self._fill(fetch, mine, wanted, segments)
                copied = self._copied(here, segments) if here else set()
                rest += [index for index in here.keys() | mine.keys() if index not in copied]
                wanted = {index: key for index, key in wanted.items() if index not in here and index not in mine}
                if here or mine:
                    patient_until = _patient_until()
                if wanted and not mine:
                    self._await_change(seen)
        return sorted([*rest, *wanted])

    def _changes(self) -> int:
        changes: int = _HEADER.unpack_from(self._memory)[1]
        return changes

    def _await_change(self, seen: int) -> None:
        """Until the table is not as it was seen, or somebody has had it for too long."""
        deadline = time.monotonic() + _PATIENCE_S
        while self._changes() == seen and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _look(self, wanted: Mapping[int, _Key]) -> tuple[dict[int, _Claim], dict[int, _Claim], int]:
        """Which blocks are in which slots; some that nobody has, which are ours to read now; ``_changes`` then."""
        here: dict[int, _Claim] = {}
        mine: dict[int, _Claim] = {}
        with self._locked():
            now = time.monotonic_ns()
            words = struct.unpack_from(f"={SLOTS * _WORDS}Q", self._memory, _HEADER.size)
            filling = {slot: claimed for slot, claimed in enumerate(words[::_WORDS]) if claimed}
            late = {slot for slot, claimed in filling.items() if now - claimed > _PATIENCE_S * 1e9}
            keys = zip(*(words[word::_WORDS] for word in range(2, _WORDS)), strict=True)
            found = {key: slot for slot, key in enumerate(keys) if slot not in late}
            for index, key in wanted.items():
                slot = found.get(key)
                if slot is not None and slot not in filling:
                    here[index] = _Claim(slot, words[slot * _WORDS + 1])
            taken = {*filling, *(claim.slot for claim in here.values())}
            for index, key in wanted.items():
                if key not in found and len(mine) < _BATCH and len(taken) < SLOTS:
                    claim = _Claim(self._next_slot(taken), secrets.randbits(63) + 1)
                    taken.add(claim.slot)
                    mine[index] = claim
                    self._claim(claim, now, key)
            if len(late) == SLOTS:
                raise TimeoutError("all who shared blocks have stopped")
            return here, mine, self._changes()

    def _next_slot(self, taken: Set[int]) -> int:
        cursor, changes = _HEADER.unpack_from(self._memory)
        slot: int = cursor % SLOTS
        while slot in taken:
            slot = (slot + 1) % SLOTS
        _HEADER.pack_into(self._memory, 0, (slot + 1) % SLOTS, changes)
        return slot

    def _direct(self, fd: int, status: os.stat_result) -> int:
        """The file, opened once to be read past the page cache where that goes."""
        with self._mutex:
            key = (fd, status.st_dev, status.st_ino)
            if key not in self._files:
                try:
                    self._files[key] = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
                except OSError:
                    self._files[key] = os.dup(fd)
            return self._files[key]

    def _read_file(self, file: int, room: memoryview, begin: int) -> None:
        """``room`` is the begin of this thread's, and is read in whole pages."""
        pages = self._room()[: (len(room) + PAGE - 1) & -PAGE]
        if os.preadv(file, [pages], begin) < len(room):
            raise OSError(errno.ENODATA, "the file ends too early")

    def _fill(
        self,
        fetch: Fetch,
        mine: Mapping[int, _Claim],
        wanted: Mapping[int, _Key],
        segments: Sequence[Segment | BoxSegment],
    ) -> dict[int, _Claim]:
        """Those of ``mine`` that were read, neighbours in one go, and verified."""
        filled: dict[int, _Claim] = {}
        try:
            for run in _runs([(segments[index].offset, size_of(segments[index]), index) for index in mine]):
                begin = run[0][0] & -PAGE
                needed = run[-1][0] + run[-1][1] - begin
                with contextlib.suppress(OSError):  # who reads from the file instead will say so
                    fetch(self._room()[:needed], begin)
                    for offset, size, index in run:
                        start, data = self._start(mine[index].slot), offset - begin
                        slot = self._memory[start : start + size]
                        if copy_crc32c(slot, self._room()[data : data + size]) == segments[index].crc32c:
                            filled[index] = mine[index]
        finally:
            with self._locked():
                for index, claim in mine.items():
                    self._release(claim, index in filled)
        return filled

    def _room(self) -> memoryview:
        """Of this thread: large pages, since a device is told of each."""
        if not hasattr(self._rooms, "memory"):
            size = _BATCH * (BLOCK_BYTES + _GAP_BYTES) + 2 * PAGE
            room = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):
                room.madvise(mmap.MADV_HUGEPAGE)
            first = -ctypes.addressof(ctypes.c_char.from_buffer(room)) % HUGE_PAGE
            self._rooms.memory = memoryview(room)[first : first + size]
        memory: memoryview = self._rooms.memory
        return memory

    def _start(self, slot: int) -> int:
        return _TABLE_BYTES + slot * BLOCK_BYTES

    def _copied(self, here: Mapping[int, _Claim], segments: Sequence[Segment | BoxSegment]) -> set[int]:
        """Those that are where they belong: no slot was another one's by the time it was copied."""
        order = sorted(here, key=lambda index: here[index].slot)
        moved = [segments[index]._replace(offset=self._start(here[index].slot)) for index in order]
        direct_io.copy_segments(self._memory, moved)
        return {index for index in order if self._entry(here[index].slot).token == here[index].token}

    def _entry(self, slot: int) -> _Entry:
        claimed, token, *key = _ENTRY.unpack_from(self._memory, self._at(slot))
        return _Entry(claimed, token, tuple(key))

    def _at(self, slot: int) -> int:
        return _HEADER.size + slot * _ENTRY.size

    def _claim(self, claim: _Claim, now: int, key: _Key) -> None:
        _ENTRY.pack_into(self._memory, self._at(claim.slot), now, claim.token, *key)
        self._note_change()

    def _release(self, claim: _Claim, is_filled: bool) -> None:
        if self._entry(claim.slot).token == claim.token:
            if not is_filled:
                _KEY.pack_into(self._memory, self._at(claim.slot) + _ENTRY.size - _KEY.size, *_NOTHING)
            _CLAIMED.pack_into(self._memory, self._at(claim.slot), 0)
            self._note_change()

    def _note_change(self) -> None:
        cursor, changes = _HEADER.unpack_from(self._memory)
        _HEADER.pack_into(self._memory, 0, cursor, (changes + 1) % (1 << 64))

    def close(self) -> None:
        """The last one removes the file."""
        for file in self._files.values():
            os.close(file)
        remove_if_unused(self._fd, self._path)
        self._memory.release()
        os.close(self._fd)


def _runs(blocks: Sequence[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """(offset, size, ...) of blocks, by offset: those together that are to be read in one go."""
    runs: list[list[tuple[int, int, int]]] = []
    for block in blocks:
        if runs and block[0] - sum(runs[-1][-1][:2]) <= _GAP_BYTES:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def _lock_table(fd: int, kind: int) -> None:
    """Of the open file, not of the process: others may have it open there, too. fcntl(2)."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("@hhqqi", kind, os.SEEK_SET, 0, 1, 0))


def _patient_until() -> float:
    return time.monotonic() + 3 * _PATIENCE_S


def remove_if_unused(fd: int, path: Path) -> None:
    """The file of a ring of this user's that nobody uses. Raises nothing."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(fd, path) and os.fstat(fd).st_uid == os.geteuid():
            path.unlink()


def _is_at(fd: int, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(fd), path.lstat())
    return False
