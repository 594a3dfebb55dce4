"""The table of a ring of shared blocks: which block is in which slot, and how far the readers have come.

It is in shared memory. A writer may be killed or stopped between any two stores, so readers validate every entry. A
lock (``table_lock``) protects the table; it is held for a look only.

The slowest reader evicts only blocks that are needed after its own position. Without that rule, readers that are
further apart than the ring is long would each have to read everything. Readers in front wait instead, but only for
readers that were seen a moment ago, so no process can block another.
"""

from __future__ import annotations

import secrets
import struct
import threading
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from resilio_hpc.ckpt.format.pages import PAGE
from resilio_hpc.ckpt.restore.table_lock import LOCK_PATIENCE_S, locked
from resilio_hpc.native import await_word, change_word

SLOTS = 64
BATCH = 4
"""Blocks that a thread reads in one go: what the disk likes to get."""
PATIENCE_S = 2.0
"""Then a block that another process reads is read here, too."""
READERS = 128  # threads; the positions of more are not recorded
_SEEN_S = 0.2  # a reader that has looked since is alive
_NEAR_BYTES = 256 << 20  # a reader further behind reads on its own
_HEADER = struct.Struct("=QII")  # see _Header
_CURSOR_AT, _CHANGES_AT, _HELD_AT = 0, 8, 12
_CLAIMED, _CONTENT = struct.Struct("=Q"), struct.Struct("=QQQQQ")
_ENTRY = struct.Struct("=QQQQQQ")  # written in this order
_WORDS = _ENTRY.size // 8
_READER = struct.Struct("=QQQQ")  # time of the last look; device, inode, offset of the first byte that is still needed
_READERS_AT = PAGE
BYTES = 2 * PAGE

Key = tuple[int, int, int, int]
"""A block: device, inode, offset, checksum."""
_NOTHING = (0, 0, 0, 0, 0)
_File = tuple[int, int]


@dataclass(frozen=True)
class RingLimits:
    """Limits of a ring; ``slots`` is the same for all its users.

    ``near_bytes``: a reader further behind reads on its own. ``patience_s``: after so long, a block that another
    process reads is read here too. ``seen_s``: a reader that has looked since is alive. ``lock_patience_s``: for the
    table.
    """

    slots: int = SLOTS
    readers: int = READERS
    near_bytes: int = _NEAR_BYTES
    patience_s: float = PATIENCE_S
    seen_s: float = _SEEN_S
    lock_patience_s: float = LOCK_PATIENCE_S


LIMITS = RingLimits()


class _Header(NamedTuple):
    """The header. ``cursor``: the slot to use next, if possible.

    ``changes``: a counter of news that readers wait for. ``held``: whether a reader waits for a slot.
    """

    cursor: int
    changes: int
    held: int


class Entry(NamedTuple):
    """The contents of a slot.

    ``claimed``: since when (CLOCK_MONOTONIC, ns) a process reads it; 0: the block is there. ``token``: new each time;
    0: the slot may have no memory yet.
    """

    claimed: int
    token: int
    key: Key


class Claim(NamedTuple):
    """A slot with a certain content. ``is_new``: it may have no memory yet."""

    slot: int
    token: int
    is_new: bool = False


class Look(NamedTuple):
    """The result of a look: the wanted blocks and their slots.

    Some were in no slot, and are the caller's to read now; for ``BlockTable.await_change``.
    """

    here: dict[int, Claim]
    mine: dict[int, Claim]
    changes: int


class Reader:
    """A thread, as long as it wants blocks of a file."""

    number: int | None = None
    """Of its entry; None: it has none, and no process waits for it."""
    offset = -1


class BlockTable:
    """The table at the beginning of this memory. A mutex serialises the threads of a process."""

    def __init__(self, memory: memoryview, fd: int, limits: RingLimits = LIMITS) -> None:
        """``memory``: at least ``BYTES`` of the file ``fd``."""
        self._memory, self._fd, self._limits = memory, fd, limits
        self._mutex = threading.Lock()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._mutex, locked(self._fd, self._limits.lock_patience_s):
            yield

    def look(self, wanted: Mapping[int, Key], reader: Reader) -> Look:
        """Return the available ones of a reader's blocks, all of one file, by offset. Raises TimeoutError."""
        now = time.monotonic_ns()
        first = min(wanted.values())
        with self._locked():
            lets_go = self._note(reader, first, now) and self._let_go()
            found = self._look(wanted, now, first)
        if lets_go:
            change_word(self._memory, _CHANGES_AT)
        return found

    def look_ahead(self, wanted: Mapping[int, Key]) -> dict[int, Claim]:
        """Return wanted blocks that are in no slot, for the caller to read now, before it needs them.

        The caller needs them later, as ``look_ahead`` says.
        """
        with self._locked():
            return self._look(wanted, time.monotonic_ns(), None).mine

    def _look(self, wanted: Mapping[int, Key], now: int, at: Key | None) -> Look:
        here: dict[int, Claim] = {}
        mine: dict[int, Claim] = {}
        words = struct.unpack_from(f"={self._limits.slots * _WORDS}Q", self._memory, _HEADER.size)
        filling = {slot: claimed for slot, claimed in enumerate(words[::_WORDS]) if claimed}
        late = {slot for slot, claimed in filling.items() if now - claimed > self._limits.patience_s * 1e9}
        keys = list(zip(*(words[word::_WORDS] for word in range(2, _WORDS)), strict=True))
        found = {key: slot for slot, key in enumerate(keys) if slot not in late}
        missing: list[tuple[int, Key]] = []
        for index, key in wanted.items():
            slot = found.get(key)
            if slot is None:
                missing.append((index, key))
            elif slot not in filling:
                here[index] = Claim(slot, words[slot * _WORDS + 1])
        if missing:
            taken = {*filling, *(claim.slot for claim in here.values())}
            choose = self._chooser(keys, now, at)
            for index, key in missing[:BATCH]:
                slot = choose(key, taken)
                if slot is None:
                    struct.pack_into("=I", self._memory, _HELD_AT, 1)
                    break
                mine[index] = Claim(slot, secrets.randbits(63) + 1, words[slot * _WORDS + 1] == 0)
                taken.add(slot)
                self.claim(mine[index], now, key)
        if len(late) == self._limits.slots:
            raise TimeoutError("all who shared blocks have stopped")
        return Look(here, mine, self._header().changes)

    def _chooser(self, keys: list[Key], now: int, at: Key | None) -> Callable[[Key, Collection[int]], int | None]:
        """Return the choice of the next slot for a block, except slots in use.

        It returns None when close readers need the contents of all others. ``at``: the first block that the caller
        needs; None: none for now.
        """
        places: dict[_File, list[int]] = defaultdict(list)
        for _, device, inode, offset in self._readers(now):
            places[device, inode].append(offset)
        for offsets in places.values():
            offsets.sort()
        slots, near_bytes = self._limits.slots, self._limits.near_bytes

        def is_wanted(slot: int) -> bool:
            device, inode, offset, _ = keys[slot]
            offsets = places.get((device, inode), [])
            behind = bisect_right(offsets, offset)
            return behind > 0 and offset - offsets[behind - 1] <= near_bytes

        def is_slowest() -> bool:
            if at is None:
                return False
            offsets = places.get(at[:2], [])
            behind = bisect_left(offsets, at[2])
            return behind == 0 or at[2] - offsets[behind - 1] > near_bytes

        def choose(key: Key, taken: Collection[int]) -> int | None:
            cursor = self._header().cursor
            for slot in ((cursor + step) % slots for step in range(slots)):
                if slot not in taken and not is_wanted(slot):
                    struct.pack_into("=Q", self._memory, _CURSOR_AT, (slot + 1) % slots)
                    return slot
            if not is_slowest():
                return None
            # the other readers need it: blocks that are needed after it are replaced, the last one first
            later = [slot for slot in range(slots) if slot not in taken and keys[slot][:3] > key[:3]]
            return max(later, key=lambda slot: keys[slot][:3], default=None)

        return choose

    def _readers(self, now: int) -> Iterator[tuple[int, ...]]:
        words = struct.unpack_from(f"={self._limits.readers * 4}Q", self._memory, _READERS_AT)
        for number, seen in enumerate(words[::4]):
            if abs(now - seen) < self._limits.seen_s * 1e9:
                yield words[4 * number : 4 * number + 4]

    def _note(self, reader: Reader, first: Key, now: int) -> bool:
        """Record how far the reader is; return whether it has moved."""
        if reader.number is None:
            seen = struct.unpack_from(f"={self._limits.readers * 4}Q", self._memory, _READERS_AT)[::4]
            # another reader that comes back after so long shares the entry, and one of the two may not be waited for
            free = (number for number, at in enumerate(seen) if abs(now - at) > self._limits.patience_s * 1e9)
            reader.number = next(free, None)
        has_moved = 0 <= reader.offset < first[2]
        reader.offset = first[2]
        if reader.number is not None:
            _READER.pack_into(self._memory, _READERS_AT + reader.number * _READER.size, now, *first[:3])
        return has_moved

    def leave(self, reader: Reader) -> None:
        """Leave: the reader has all blocks, or reads them elsewhere."""
        with suppress(TimeoutError), self._locked():
            if reader.number is not None:
                _READER.pack_into(self._memory, _READERS_AT + reader.number * _READER.size, 0, 0, 0, 0)
            if not self._let_go():
                return
        change_word(self._memory, _CHANGES_AT)

    def _let_go(self) -> bool:
        """Return whether a process was waiting for a slot, and clear that mark."""
        is_held = self._header().held != 0
        struct.pack_into("=I", self._memory, _HELD_AT, 0)
        return is_held

    def _header(self) -> _Header:
        return _Header(*_HEADER.unpack_from(self._memory))

    def await_change(self, look: Look) -> None:
        """Wait until something may be new since that look, for a short time at most."""
        await_word(self._memory, _CHANGES_AT, look.changes, self._limits.seen_s)

    def entry(self, slot: int) -> Entry:
        """Return the contents of a slot."""
        claimed, token, *key = _ENTRY.unpack_from(self._memory, self._at(slot))
        return Entry(claimed, token, tuple(key))

    def _at(self, slot: int) -> int:
        return _HEADER.size + slot * _ENTRY.size

    def claim(self, claim: Claim, now: int, key: Key) -> None:
        """Record that a slot is being filled with that block."""
        _ENTRY.pack_into(self._memory, self._at(claim.slot), now, claim.token, *key)

    def release(self, mine: Mapping[int, Claim], filled: Collection[int]) -> None:
        """Record which of ``mine`` are ``filled``; the others are free. Raises TimeoutError."""
        with self._locked():
            for index, claim in mine.items():
                if self.entry(claim.slot).token == claim.token:
                    if index not in filled:
                        _CONTENT.pack_into(self._memory, self._at(claim.slot) + _CLAIMED.size, *_NOTHING)
                    _CLAIMED.pack_into(self._memory, self._at(claim.slot), 0)
        change_word(self._memory, _CHANGES_AT)
