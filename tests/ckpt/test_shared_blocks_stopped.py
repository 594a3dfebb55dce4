"""The ring of common blocks while its readers stop, die or lag: the others read on, and what they read is right."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.ckpt.restore import block_ring, block_table, table_lock
from resilio_hpc.ckpt.restore.block_table import LIMITS, RingLimits
from resilio_hpc.ckpt.restore.shared_blocks import SharedBlocks, sweep
from resilio_hpc.native import direct_io
from tests.support.ckpt.opened import opened
from tests.support.ckpt.ring_readers import BLOCK, is_right, reader, wanted
from tests.support.waiting import PATIENCE_S, until

IMPATIENT = RingLimits(patience_s=0.2, lock_patience_s=0.2)
PATIENT = RingLimits(patience_s=PATIENCE_S, seen_s=PATIENCE_S, lock_patience_s=PATIENCE_S)


def claimed_blocks(rings: Path) -> int:
    """How many slots of the ring there have been used."""
    (path,) = rings.iterdir()
    with path.open("rb") as file:
        memory = memoryview(bytearray(file.read(block_table.BYTES)))
    table = block_table.BlockTable(memory, -1)
    return sum(table.entry(slot).token != 0 for slot in range(LIMITS.slots))


def test_processes_are_right_while_others_are_killed_and_stopped(rings: Path, file: int, disk_path: Path) -> None:
    victims = [reader(rings, disk_path, "claim") for _ in range(2)]
    for victim in victims:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "reads\n"
    victims += [reader(rings, disk_path) for _ in range(2)]
    good = [reader(rings, disk_path) for _ in range(2)]
    until(lambda: good[0].poll() is not None or claimed_blocks(rings) > 8, "they read")
    victims[0].kill()
    victims[1].send_signal(signal.SIGSTOP)
    victims[2].kill()
    victims[3].send_signal(signal.SIGSTOP)
    try:
        for process in good:
            assert process.communicate(timeout=PATIENCE_S)[0] == "done\n"
        assert len(list(rings.iterdir())) == 1  # the stopped ones have it
    finally:
        for victim in victims:
            victim.kill()
            victim.communicate()
    sweep(rings)


def test_a_block_that_is_there_just_after_the_look_is_not_waited_for(
    rings: Path, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With this patience the test would hang."""
    with closing(SharedBlocks("x", rings, PATIENT)) as one, closing(SharedBlocks("x", rings, PATIENT)) as other:
        assert [one.read(opened(file).file, wanted([5])), other.read(opened(file).file, wanted([5]))] == [[], []]
        ring, reader = one._ring, other._ring
        assert ring is not None
        assert reader is not None
        segments, status = wanted([0]), os.fstat(file)
        keys = {0: (status.st_dev, status.st_ino, 0, segments[0].crc32c)}
        mine = ring.table.look(keys, block_table.Reader()).mine
        look = reader.table.look

        def slow(*sought: Any) -> Any:
            found = look(*sought)
            if mine:
                ring._fill(partial(ring._read_file, opened(file).file), mine, segments)
                mine.clear()
            return found

        monkeypatch.setattr(reader.table, "look", slow)
        found = wanted([0])
        assert other.read(opened(file).file, found) == []
        assert is_right(found)


def test_a_slot_of_a_reader_who_stopped_is_not_used_again(
    rings: Path, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(SharedBlocks("x", rings, IMPATIENT)) as stopped, closing(SharedBlocks("x", rings, IMPATIENT)) as other:
        mine = wanted()
        goes_on = threading.Event()
        preadv = os.preadv

        def slow(fd: int, rooms: Any, offset: int) -> int:
            if threading.current_thread() is thread and not goes_on.is_set():
                goes_on.wait(PATIENCE_S)
            return preadv(fd, rooms, offset)

        monkeypatch.setattr(os, "preadv", slow)
        thread = threading.Thread(target=lambda: stopped.read(opened(file).file, mine))
        thread.start()
        until(lambda: stopped._ring is not None and stopped._ring.table.entry(0).claimed, "it reads")
        for shift in range(0, 5 * 4096, 4096):  # round the ring
            first = wanted(range(20), shift)
            assert other.read(opened(file).file, first) == []
            assert is_right(first)
        assert other._ring is not None
        claimed = [slot for slot in range(LIMITS.slots) if other._ring.table.entry(slot).claimed]
        assert len(claimed) == 4  # of the one that stands still
        goes_on.set()
        thread.join(PATIENCE_S)
        assert is_right(mine)


def test_when_all_slots_are_with_readers_who_stopped_all_is_read_from_the_file(rings: Path, file: int) -> None:
    with closing(SharedBlocks("x", rings, IMPATIENT)) as one:
        assert one.read(opened(file).file, wanted()) == []
        assert one._ring is not None
        for slot in range(LIMITS.slots):
            one._ring.table.claim(block_table.Claim(slot, slot), 1, (1, 1, slot, 0))
        found = wanted()
        assert one.read(opened(file).file, found) == []
        assert is_right(found)


def test_a_slot_that_got_another_block_while_it_was_copied_does_not_count(
    rings: Path, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(SharedBlocks("x", rings)) as one, closing(SharedBlocks("x", rings)) as other:
        assert one.read(opened(file).file, wanted()) == []
        copy = direct_io.copy_segments
        raced: list[int] = []

        class Racing:
            @staticmethod
            def copy_segments(memory: memoryview, segments: Any) -> None:
                if not raced:  # all slots get other blocks, then it copies
                    raced.append(1)
                    assert other.read(opened(file).file, wanted(range(20), 4096 * 7)) == []
                    for slot in range(LIMITS.slots):
                        start = block_table.BYTES + slot * BLOCK
                        one._ring._memory[start : start + BLOCK] = bytes(BLOCK)  # type: ignore[union-attr]
                        claim = block_table.Claim(slot, slot + 5)
                        one._ring.table.claim(claim, 1, (1, 1, slot, 0))  # type: ignore[union-attr]
                        one._ring.table.release({0: claim}, {0})  # type: ignore[union-attr]
                copy(memory, segments)

        monkeypatch.setattr(block_ring, "direct_io", Racing)
        found = wanted()
        assert one.read(opened(file).file, found) == []
        assert raced
        assert is_right(found)


def test_a_table_that_somebody_holds_is_not_waited_for_long(rings: Path, file: int) -> None:
    with closing(SharedBlocks("x", rings, IMPATIENT)) as one:
        assert one.read(opened(file).file, wanted([0])) == []
        holder = os.open(next(rings.iterdir()), os.O_RDWR)
        table_lock.lock(holder, fcntl.F_WRLCK)
        found = wanted()
        assert one.read(opened(file).file, found) == []  # and does not hang
        assert is_right(found)
        os.close(holder)


def test_a_table_of_another_time_is_not_waited_for_for_ever(rings: Path, file: int) -> None:
    """As of a process with a clock of its own (time namespaces), or garbage."""
    with closing(SharedBlocks("x", rings, IMPATIENT)) as one:
        assert one.read(opened(file).file, wanted([0])) == []
        assert one._ring is not None
        for slot in range(LIMITS.slots):
            one._ring.table.claim(block_table.Claim(slot, 1), 1 << 63, (1, 1, slot, 0))
        found = wanted()
        assert one.read(opened(file).file, found) == []
        assert is_right(found)


class Killed(BaseException):
    """In the place of SIGKILL."""


class Torn:
    """A struct whose writer is killed after some words."""

    def __init__(self, whole: struct.Struct, left: int) -> None:
        self.size, self.unpack_from = whole.size, whole.unpack_from
        self._left = left

    def pack_into(self, memory: Any, at: int, *words: int) -> None:
        for number, word in enumerate(words):
            if self._left == 0:
                raise Killed
            struct.pack_into("=Q", memory, at + 8 * number, word)
            self._left -= 1


@pytest.mark.parametrize("words", range(6))
def test_who_is_killed_while_he_changes_an_entry_leaves_no_block_that_counts(
    rings: Path, file: int, monkeypatch: pytest.MonkeyPatch, words: int
) -> None:
    with closing(SharedBlocks("x", rings)) as one:
        assert one.read(opened(file).file, wanted([0])) == []
        ring = one._ring
        assert ring is not None
        before = ring.table.entry(0)
        assert (before.claimed, before.key[2:]) == (0, (0, wanted([0])[0].crc32c))
        claim = block_table.Claim(0, 77)

        def torn(act: Callable[[], None]) -> block_table.Entry:
            for name in ("_ENTRY", "_CONTENT", "_CLAIMED"):
                monkeypatch.setattr(block_table, name, Torn(getattr(block_table, name), words))
            with suppress(Killed):
                act()
            monkeypatch.undo()
            return ring.table.entry(0)

        after = torn(lambda: ring.table.claim(claim, 5, (6, 6, 6, 6)))
        assert after == before if words == 0 else after.claimed
        ring.table.claim(claim, 5, (6, 6, 6, 6))
        after = torn(lambda: ring.table.release({0: claim}, {}))  # it could not be read
        assert after.claimed or (after.token, after.key) == (0, (0, 0, 0, 0))


def test_the_last_one_removes_the_ring_and_what_killed_ones_left_is_swept(
    rings: Path, file: int, disk_path: Path
) -> None:
    path = rings / f"resilio-blocks-{os.geteuid()}-x"
    one, other = SharedBlocks("x", rings), SharedBlocks("x", rings)
    for blocks in (one, other):
        assert blocks.read(opened(file).file, wanted()) == []
    one.close()
    sweep(rings)
    assert path.stat().st_mode & 0o777 == 0o600
    other.close()
    assert not path.exists()
    killed = reader(rings, disk_path, "claim")
    assert killed.stdout is not None
    killed.stdout.readline()
    killed.kill()
    killed.communicate()
    assert path.exists()
    with closing(SharedBlocks("another step", rings)) as later:
        assert later.read(opened(file).file, wanted([0])) == []
        assert not path.exists()
