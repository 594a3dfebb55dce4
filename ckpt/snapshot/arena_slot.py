"""One arena file of a rank, in shared memory or on disk: made large, present, locked, filled and declared whole."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from resilio_hpc.ckpt.format.pages import PAGE
from resilio_hpc.ckpt.format.whole_snapshot import Header
from resilio_hpc.ckpt.snapshot import arena, huge_memory
from resilio_hpc.ckpt.snapshot.arena import EMPTY, HUGE, HUGE_AT, STATE_AT, WHOLE, WRITING
from resilio_hpc.core.file_system import is_in_memory
from resilio_hpc.core.memory_left import refuse_to_fill_memory
from resilio_hpc.native import map_shared, populate

LockPages = Callable[[memoryview], Callable[[], None] | None]
"""Have devices write straight into this memory; what ends that. None: there is no need, or no way."""

NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
_SHARED_MEMORY = Path("/dev/shm")
_PIECE_BYTES = 64 << 20
_MAP_BYTES = 32 << 20


class Slot:
    """One arena file, open for its owner. All methods raise OSError (ENOSPC when there is no room)."""

    def __init__(self, path: Path | None, spill: Path, on_disk: bool, lock_pages: LockPages) -> None:
        """Open a slot. ``path`` None: a file without a name, which ends with the process.

        ``spill``: directory for files on disk.
        """
        self.map: memoryview | None = None
        self._lock_pages = lock_pages
        self._unlock_pages: Callable[[], None] | None = None
        self._fd = -1
        self._is_allocated = False
        self.present_bytes = 0  # of ``map``, from its begin: an access to these is no fault
        self._spill = spill
        self.on_disk = on_disk
        self.why_on_disk = ""
        self._fd, self.path = self._open_nameless() if path is None else self._open_named(path)

    def _open_named(self, path: Path) -> tuple[int, Path]:
        if self.on_disk:
            self._spill.mkdir(mode=0o700, parents=True, exist_ok=True)
            target = self._spill / path.name
            if not path.is_symlink() or path.readlink() != target:
                path.unlink(missing_ok=True)
                path.symlink_to(target)
        self.on_disk = path.is_symlink()  # a former life of this rank left it so
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), path

    def _open_nameless(self) -> tuple[int, Path]:
        if self.on_disk:
            self._spill.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = self._spill if self.on_disk else _SHARED_MEMORY
        fd = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        return fd, Path(f"/proc/self/fd/{fd}")

    def move_to_disk(self, why: str) -> None:
        """Shared memory has no room: from now on this slot is a file on disk (locked before and after)."""
        self.why_on_disk = why
        self._move(on_disk=True)

    def move_to_memory(self) -> None:
        """Make this slot an empty file in shared memory again: the disk has no room (locked before and after)."""
        self.why_on_disk = ""
        self._move(on_disk=False)

    def _move(self, on_disk: bool) -> None:
        named = not self.path.is_relative_to("/proc")
        self.close()
        if named and not on_disk:
            (self._spill / self.path.name).unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)
        self.on_disk = on_disk
        self._fd, self.path = self._open_named(self.path) if named else self._open_nameless()
        self.lock()

    @property
    def place(self) -> Path:
        """Return its place, for people: a file without a name has no path that tells it."""
        return self._spill if self.on_disk else _SHARED_MEMORY

    @property
    def is_in_place(self) -> bool:
        """Return whether this is still the file that its path names."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self._fd))
        except OSError:
            return False

    @property
    def header(self) -> Header | None:
        """Return the header when a whole snapshot is here."""
        return arena.header_of(self._fd)

    @property
    def size_bytes(self) -> int:
        """Return the size of the file."""
        return os.fstat(self._fd).st_size

    def lock(self) -> bool:
        """Take the right to write; return False while a process has pinned this slot."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        """Give the right to write back."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    @property
    def has_huge_pages(self) -> bool:
        """Return whether its mapping takes no time: the kernel gave huge pages, or the mount does (``huge=always``)."""
        if self.on_disk:
            return False
        return huge_memory.mount_has_huge_pages(self._fd) or os.pread(self._fd, len(HUGE), HUGE_AT) == HUGE

    def clear(self) -> None:
        """Forget the snapshot (locked)."""
        if self.size_bytes >= PAGE:
            os.pwrite(self._fd, EMPTY, STATE_AT)

    def make_room(self, size: int) -> memoryview:
        """Return writable memory of at least ``size`` bytes, with every page present (locked; the snapshot is lost).

        It is allocated first, so that full memory is an error here and not a SIGBUS later. Pages are faulted in now
        because a fault costs ten times the copy; in huge pages if possible: 2 MiB in one fault, and a device that
        writes them has a five-hundredth of the pages to hold.
        """
        size = -(-size // PAGE) * PAGE
        present = self.size_bytes
        if present < size or present > 2 * size + (64 << 20):
            self.clear()
            self._unmap()
            if present > size:
                os.ftruncate(self._fd, size)
        if not self._is_allocated:
            self._allocate(size)  # also for an old file: a former life may have died half-way
        memory = self._mapped()
        if not self._is_allocated:
            populate(memory)
            self._is_allocated = True
            self.present_bytes = len(memory)
        if self._unlock_pages is None and not self.on_disk:
            self._unlock_pages = self._lock_pages(memory)
        return memory[:]

    def make_room_anywhere(self, size: int) -> memoryview:
        """Do the same; on disk, where shared memory has no room (locked)."""
        try:
            return self.make_room(size)
        except OSError as error:
            if self.on_disk or error.errno not in NO_ROOM:
                raise
            self.move_to_disk(error.strerror or str(error))
            try:
                return self.make_room(size)
            except OSError:
                self.move_to_memory()  # a later one may be smaller, or find more room
                raise

    def map_snapshot(self, size: int, is_wanted: Callable[[], bool]) -> None:
        """Map the pages of a whole snapshot of that size, while ``is_wanted`` says so; only of one in memory."""
        if self.on_disk:
            return
        memory = self._mapped()
        while self.present_bytes < size and is_wanted():
            end = min(self.present_bytes + _MAP_BYTES, size)
            populate(memory[self.present_bytes : end])
            self.present_bytes = end

    def _mapped(self) -> memoryview:
        if self.map is None:
            self.map = map_shared(self._fd, self.size_bytes, True)
        return self.map

    def _allocate(self, size: int) -> None:
        """Allocate piece by piece, each after a look at the free memory: all ranks of a node do it at the same time."""
        present = self.size_bytes
        self._refuse_to_fill(size)
        if self.on_disk and not is_in_memory(self._fd):
            try:
                os.posix_fallocate(self._fd, 0, size)
            except OSError:
                os.ftruncate(self._fd, min(present, size))  # else the part that was allocated keeps the disk full
                raise
            return
        if present < size:
            os.ftruncate(self._fd, size)
        has_huge_pages = self.has_huge_pages if present else not self.on_disk
        try:
            for at in range(0, size, _PIECE_BYTES):
                piece = min(_PIECE_BYTES, size - at)
                if os.lseek(self._fd, at, os.SEEK_HOLE) < at + piece:
                    refuse_to_fill_memory(piece)
                    has_huge_pages = huge_memory.allocate(self._fd, self._mapped(), at, at + piece, has_huge_pages)
        except OSError:
            self._unmap()
            os.ftruncate(self._fd, min(present, size))  # the allocation is given back, and no process maps the hole
            raise
        os.pwrite(self._fd, HUGE if has_huge_pages else bytes(len(HUGE)), HUGE_AT)

    def _refuse_to_fill(self, size: int) -> None:
        """Raise OSError (ENOSPC) before what is left is taken in vain: others use that file system, too."""
        there, room = os.fstat(self._fd).st_blocks * 512, os.fstatvfs(self._fd)
        if room.f_blocks and room.f_bavail * room.f_frsize < size - there:  # 0: a tmpfs without a limit
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def give_room(self) -> None:
        """Give all of its room back (locked; the snapshot is lost)."""
        self.clear()
        self._unmap()
        os.ftruncate(self._fd, 0)

    def begin(self) -> None:
        """Empty the slot until ``finish`` (locked)."""
        os.pwrite(self._fd, WRITING, STATE_AT)

    def finish(self, header: Header) -> None:
        """Write the header of the complete content, then, last, the state word that makes it valid."""
        assert self.map is not None
        fields = arena.pack(header)
        self.map[: len(fields)] = fields
        self.map[STATE_AT : STATE_AT + 8] = WHOLE

    def close(self) -> None:
        """Unmap and close; the file stays."""
        self._unmap()
        os.close(self._fd)
        self._fd = -1

    def __del__(self) -> None:
        if self._fd >= 0:
            self.close()

    def _unmap(self) -> None:
        if self._unlock_pages is not None:
            self._unlock_pages()
            self._unlock_pages = None
        self.map = None  # unmapped when no code uses any part of it any more
        self._is_allocated = False
        self.present_bytes = 0
