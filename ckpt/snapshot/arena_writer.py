"""A rank's side of its arenas: the slot that a step is written to, and the one that holds a step."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.ckpt.format.manifest import Layout
from resilio_hpc.ckpt.format.whole_snapshot import Header
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.arena_slot import NO_ROOM, LockPages, Slot
from resilio_hpc.core.errors import SaveRefused, os_error_text


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
        self.only_one = ""
        """Why the newest snapshot was written over the one before; "": it was not."""
        self.durable_step = -1
        """The newest step that is known to be committed, of this life."""
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
        there is no room, SaveRefused when both slots are pinned.

        Where neither memory nor disk has room for the other slot, the one that is there takes every snapshot
        (``only_one``). It is written over in its own room alone: a slot that would have to grow keeps what it holds.
        """
        no_room: OSError | None = None
        is_pinned = False
        with self._lock:
            headers = [slot.header for slot in self._all]
            sequence = 1 + max((header.sequence for header in headers if header is not None), default=0)
            slots: Iterable[Slot] = sorted(self._slots, key=lambda slot: _worth(slot.header, step))
            if is_last and self._last_path is not None:
                slots = self._slots_for_last(self._last_path)
            for slot in slots:
                if no_room is not None and slot.size_bytes < size:
                    continue
                if not slot.lock():
                    is_pinned = True
                    continue
                try:
                    room = slot.make_room_anywhere(size)
                    slot.begin()
                except BaseException as error:
                    slot.unlock()
                    if not isinstance(error, OSError):
                        raise
                    why = OSError(error.errno, error.strerror or str(error), str(slot.place))
                    if no_room is not None or is_last or error.errno not in NO_ROOM:
                        raise why from error
                    no_room = why
                    continue
                self.only_one = "" if no_room is None else os_error_text(no_room, "its arena")
                return slot, room, sequence
        if no_room is None:
            raise SaveRefused("both arenas of this rank are still being written to disk")
        if is_pinned:
            text = os_error_text(no_room, "its arena")
            raise SaveRefused(f"there is room for one snapshot alone ({text}), which is still being written to disk")
        raise no_room

    def _slots_for_last(self, third: Path) -> Iterator[Slot]:
        """Yield the slots that may take the last finished step, the best first.

        An empty one, whose memory is there already, or one that is older than the newest one, if that is committed;
        else the third. While that one is being written to disk, the others may: all ranks went on from what it holds,
        so that none needs an older snapshot any more.
        """
        yield from (slot for slot in self._slots if slot.header is None)
        held = [(header.step, slot) for slot in self._all if (header := slot.header) is not None]
        held.sort(key=lambda one: one[0])
        if held and held[-1][0] <= self.durable_step:
            yield from (slot for _, slot in held[:-1])
        self._last = last = self._last or self._open(third)
        yield last
        kept = last.header
        yield from (slot for step, slot in held if slot is not last and kept is not None and step < kept.step)

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

    def give_room(self) -> None:
        """Give back the room of both slots, but of one that is being written to disk; their snapshots are lost."""
        with self._lock:
            for slot in self._slots:
                if slot.lock():
                    slot.give_room()
                    slot.unlock()

    def drop_after(self, step: int) -> None:
        """Forget every snapshot later than ``step``, of a life that is over: training goes on from ``step``."""
        for slot in self._all:
            held = slot.header
            if held is not None and held.step > step:
                arena.mark_empty(slot.path, held.step)

    def prefault(self, size: int = 0) -> bool:
        """Make an unused slot as large as the other one and ``size``, in the background of training.

        Return whether there was one that was not.
        """
        with self._lock:
            size = max(size, *(slot.size_bytes for slot in self._slots))
            for slot in self._slots:
                if slot.map is None and slot.header is None and slot.lock():
                    try:
                        slot.make_room(size)
                    finally:
                        slot.unlock()
                    return True
        return False

    def prefault_beside(self, size: int = 0, slots: int = 1, wait: Callable[[], object] = lambda: None) -> None:
        """Do the same until so many unused slots are ready, in a thread of its own, after ``wait``.

        Raises nothing: the save that needs them reports it.
        """

        def act() -> None:
            wait()
            with contextlib.suppress(OSError):
                while self._ready < slots and self.prefault(size):
                    pass

        threading.Thread(target=act, name="resilio-prefault", daemon=True).start()

    @property
    def _ready(self) -> int:
        """Return how many unused slots have their memory."""
        return sum(slot.map is not None and slot.header is None for slot in self._slots)

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


def _worth(header: Header | None, step: int) -> int:
    """Return how much a slot's content is worth when ``step`` is about to be saved: the lower one is overwritten."""
    if header is None:
        return -2
    return -1 if header.step > step else header.step
