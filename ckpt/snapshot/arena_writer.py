"""A rank's side of its two arenas: it chooses a slot, makes it ready, and fills it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.ckpt.format.manifest import Layout
from resilio_hpc.ckpt.format.pages import PAGE
from resilio_hpc.ckpt.format.whole_snapshot import Header
from resilio_hpc.ckpt.snapshot import arena, huge_memory
from resilio_hpc.ckpt.snapshot.arena import EMPTY, HUGE, HUGE_AT, STATE_AT, WHOLE, WRITING
from resilio_hpc.core.errors import SaveRefused
from resilio_hpc.core.file_system import is_in_memory
from resilio_hpc.core.memory_left import refuse_to_fill_memory
from resilio_hpc.native import map_shared, populate

LockPages = Callable[[memoryview], Callable[[], None] | None]
"""Have devices write straight into this memory; what ends that. None: there is no need, or no way."""

_SHARED_MEMORY = Path("/dev/shm")
_PIECE_BYTES = 64 << 20
_MAP_BYTES = 32 << 20


@dataclass(frozen=True)
class Owner:
    """The owner of arenas, written into every header."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    round: int
    layout: Layout
    run_id: str


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
        named = not self.path.is_relative_to("/proc")
        self.close()
        self.on_disk = True
        self._fd, self.path = self._open_named(self.path) if named else self._open_nameless()
        self.lock()

    @property
    def place(self) -> Path:
        """Return its place, for people: a file without a name has no path that tells it."""
        return self._spill if self.on_disk else _SHARED_MEMORY

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
        if self.on_disk and not is_in_memory(self._fd):
            os.posix_fallocate(self._fd, 0, size)
            return
        present = self.size_bytes
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


class ArenaPair:
    """The two slots of a rank. One thread at a time may save; ``prefault`` may run beside the training loop."""

    def __init__(
        self,
        directory: Path | None,
        owner: Owner,
        spill: Path,
        on_disk: bool = False,
        lock_pages: LockPages = lambda memory: None,
    ) -> None:
        """``directory`` exists; None: nameless files, which end with this process.

        ``spill``: an absolute directory on disk, for files that do not fit into memory (``on_disk``: for all).
        ``lock_pages`` is asked again, at the next save, about memory for which it had nothing to do.
        """
        self.owner = owner
        self._lock = threading.Lock()
        self._is_asked = False  # of the mapping under way
        self._slots = [
            Slot(
                None if directory is None else arena.slot_path(directory, owner.rank, number),
                spill,
                on_disk,
                lock_pages,
            )
            for number in (0, 1)
        ]

    @property
    def on_disk(self) -> bool:
        """Return whether memory had no room for some slot."""
        return any(slot.on_disk for slot in self._slots)

    @property
    def why_on_disk(self) -> str:
        """Return why memory had no room, as far as this life knows."""
        return next((slot.why_on_disk for slot in self._slots if slot.why_on_disk), "as before")

    def reserve(self, step: int, size: int) -> tuple[Slot, memoryview, int]:
        """Lock the slot for ``step``; return it, its memory (state ``writing``), and the new sequence number.

        Raises OSError, with the place, when there is no room, SaveRefused when both slots are pinned.
        """
        with self._lock:
            headers = [slot.header for slot in self._slots]
            sequence = 1 + max((header.sequence for header in headers if header is not None), default=0)
            for number in sorted((0, 1), key=lambda number: _worth(headers[number], step)):
                slot = self._slots[number]
                if not slot.lock():
                    continue
                try:
                    room = _make_room(slot, size)
                    slot.begin()
                except BaseException as error:
                    slot.unlock()
                    if isinstance(error, OSError):
                        raise OSError(error.errno, error.strerror or str(error), str(slot.place)) from error
                    raise
                return slot, room, sequence
        raise SaveRefused("both arenas of this rank are still being written to disk")

    def finish(self, slot: Slot, header: Header) -> None:
        """Complete a reserved slot, and drop snapshots that this one makes wrong.

        The same step again, or a later one of a life that was rolled back.
        """
        others = [(other.path, other.header) for other in self._slots if other is not slot]
        slot.finish(header)  # from here on a rank for which it was fetched may save into the other slot
        slot.unlock()
        for path, held in others:
            if held is not None and held.step >= header.step:
                arena.mark_empty(path, held.step)

    def abandon(self, slot: Slot) -> None:
        """Empty a reserved slot that could not be filled."""
        slot.clear()
        slot.unlock()

    def drop_after(self, step: int) -> None:
        """Forget every snapshot later than ``step``, of a life that is over: training goes on from ``step``."""
        for slot in self._slots:
            held = slot.header
            if held is not None and held.step > step:
                arena.mark_empty(slot.path, held.step)

    def prefault(self, size: int = 0) -> None:
        """Make an unused slot as large as the other one and ``size``, in the background of training."""
        with self._lock:
            size = max(size, *(slot.size_bytes for slot in self._slots))
            for slot in self._slots:
                if slot.map is None and slot.header is None and slot.lock():
                    try:
                        slot.make_room(size)
                    finally:
                        slot.unlock()
                    return

    def prefault_beside(self, size: int = 0, slots: int = 1) -> None:
        """Do the same for so many slots, in a thread of its own.

        Raises nothing: the save that needs them reports it.
        """

        def act() -> None:
            with contextlib.suppress(OSError):
                for _ in range(slots):
                    self.prefault(size)

        threading.Thread(target=act, name="resilio-prefault", daemon=True).start()

    def held(self, step: int) -> Path | None:
        """Return the arena that holds ``step``, of this rank."""
        found = self._holder(step)
        return None if found is None else found[0].path

    def map_held(self, step: int) -> None:
        """Map the snapshot of ``step``, if there is one, until ``memory`` asks for it; may run beside the script."""
        with self._lock:
            found = self._holder(step)
            if found is not None:
                found[0].map_snapshot(found[1].size_bytes, lambda: not self._is_asked)

    def memory(self, step: int) -> memoryview:
        """Return the mapped memory of the arena with ``step``, from its begin; all of it where that takes no time."""
        self._is_asked = True
        with self._lock:
            found = self._holder(step)
            if found is None:
                return memoryview(b"")
            slot, header = found
            if slot.has_huge_pages:
                slot.map_snapshot(header.size_bytes, lambda: True)
            return memoryview(b"") if slot.map is None else slot.map[: slot.present_bytes]

    def _holder(self, step: int) -> tuple[Slot, Header] | None:
        held = [(slot, header) for slot in self._slots if (header := slot.header) is not None and header.step == step]
        return max(held, key=lambda found: found[1].sequence, default=None)

    def close(self) -> None:
        """Close both; the snapshots stay."""
        with self._lock:
            for slot in self._slots:
                slot.close()


def _make_room(slot: Slot, size: int) -> memoryview:
    try:
        return slot.make_room(size)
    except OSError as error:
        if slot.on_disk or error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            raise
        slot.move_to_disk(error.strerror or str(error))
        return slot.make_room(size)


def _worth(header: Header | None, step: int) -> int:
    """Return how much a slot's content is worth when ``step`` is about to be saved: the lower one is overwritten."""
    if header is None:
        return -2
    return -1 if header.step > step else header.step
