"""A rank's side of its arenas: the slot that a step is written to, and the one that holds a step."""

from __future__ import annotations

import contextlib
import errno
import threading
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.ckpt.format.manifest import Layout
from resilio_hpc.ckpt.format.whole_snapshot import Header
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.arena_slot import LockPages, Slot
from resilio_hpc.core.errors import SaveRefused


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
        self._place = spill, on_disk, lock_pages
        self._slots = [
            self._open(None if directory is None else arena.slot_path(directory, owner.rank, number))
            for number in (0, 1)
        ]
        self._last_path = None if directory is None else arena.slot_path(directory, owner.rank, arena.LAST)
        self._last: Slot | None = None
        if self._last_path is not None and self._last_path.exists():
            self._last = self._open(self._last_path)

    def _open(self, path: Path | None) -> Slot:
        return Slot(path, *self._place)

    def pass_to(self, owner: Owner) -> bool:
        """Go on in another round with what is mapped.

        Return whether that can be: the arenas are of the same rank, and no other file has taken the place of one.
        """
        with self._lock:
            if owner.rank != self.owner.rank or not all(slot.is_in_place for slot in self._slots):
                return False
            self.owner, self._is_asked = owner, False
            if self._last is not None and not self._last.is_in_place:
                self._last.close()
                self._last = None
            if self._last is None and self._last_path is not None and self._last_path.exists():
                self._last = self._open(self._last_path)
        return True

    @property
    def _all(self) -> list[Slot]:
        return self._slots if self._last is None else [*self._slots, self._last]

    @property
    def on_disk(self) -> bool:
        """Return whether memory had no room for some slot."""
        return any(slot.on_disk for slot in self._slots)

    @property
    def why_on_disk(self) -> str:
        """Return why memory had no room, as far as this life knows."""
        return next((slot.why_on_disk for slot in self._slots if slot.why_on_disk), "as before")

    def reserve(self, step: int, size: int, is_last: bool = False) -> tuple[Slot, memoryview, int]:
        """Lock the slot for ``step``; return it, its memory (state ``writing``), and the new sequence number.

        ``is_last``: ranks cannot go on; other snapshots that may be needed stay. Raises OSError, with the place, when
        there is no room,
        SaveRefused when both slots are pinned.
        """
        with self._lock:
            headers = [slot.header for slot in self._all]
            sequence = 1 + max((header.sequence for header in headers if header is not None), default=0)
            slots = sorted(self._slots, key=lambda slot: _worth(slot.header, step))
            if is_last and self._last_path is not None:
                slots = self._slots_for_last(self._last_path)
            for slot in slots:
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

    def _slots_for_last(self, third: Path) -> list[Slot]:
        """Return the slots that may take the last finished step, the best first.

        An empty one, whose memory is there already; else the third. While that one is being written to disk, the others
        may: all ranks went on from what it holds, so that none needs an older snapshot any more.
        """
        empty = [slot for slot in self._slots if slot.header is None]
        if not empty:
            self._last = self._last or self._open(third)
        if self._last is None:
            return empty
        held = self._last.header
        steps = [(own.step, slot) for slot in self._slots if (own := slot.header) is not None]
        older = [slot for step, slot in sorted(steps, key=lambda one: one[0]) if held is not None and step < held.step]
        return [*empty, self._last, *older]

    def finish(self, slot: Slot, header: Header) -> None:
        """Complete a reserved slot, and drop snapshots that this one makes wrong.

        The same step again, or a later one of a life that was rolled back.
        """
        others = [(other.path, other.header) for other in self._all if other is not slot]
        slot.finish(header)  # from here on a rank for which it was fetched may save into the other slot
        slot.unlock()
        for path, held in others:
            if held is not None and held.step >= header.step:
                arena.mark_empty(path, held.step)
        self._let_last_go()

    def _let_last_go(self) -> None:
        """Remove the last finished step of an earlier life, once both other slots hold later ones."""
        last = self._last
        if last is None or last.path is None or not last.lock():
            return
        held, steps = last.header, [header.step for slot in self._slots if (header := slot.header) is not None]
        if held is None or (len(steps) == len(self._slots) and min(steps) > held.step):
            with self._lock:
                last.path.unlink(missing_ok=True)
                last.close()
                self._last = None
        else:
            last.unlock()

    def abandon(self, slot: Slot) -> None:
        """Empty a reserved slot that could not be filled."""
        slot.clear()
        slot.unlock()

    def drop_after(self, step: int) -> None:
        """Forget every snapshot later than ``step``, of a life that is over: training goes on from ``step``."""
        for slot in self._all:
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

    @property
    def newest_step(self) -> int:
        """Return the newest step that an arena holds; -1: none."""
        return max((header.step for slot in self._all if (header := slot.header) is not None), default=-1)

    def has(self, step: int) -> bool:
        """Return whether an arena holds ``step``, saved in this round."""
        found = self._holder(step)
        return found is not None and found[1].round == self.owner.round

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
        held = [(slot, header) for slot in self._all if (header := slot.header) is not None and header.step == step]
        return max(held, key=lambda found: found[1].sequence, default=None)

    def close(self) -> None:
        """Close both; the snapshots stay."""
        with self._lock:
            for slot in self._all:
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
