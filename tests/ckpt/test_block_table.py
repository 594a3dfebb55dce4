"""Which slot is used next: nobody is overrun who is close behind, and nobody is waited for who does not move."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from resilio_hpc.ckpt import block_table
from resilio_hpc.ckpt.block_table import Key, Look, Reader, Table
from resilio_hpc.ckpt.records import BLOCK_BYTES
from resilio_hpc.native import map_shared

SLOTS = 4


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    monkeypatch.setattr(block_table, "SLOTS", SLOTS)
    monkeypatch.setattr(block_table, "_SEEN_S", 30.0)  # whoever waits is woken, or the test is slow
    fd = os.memfd_create("table")
    os.truncate(fd, block_table.BYTES)
    yield Table(map_shared(fd, block_table.BYTES, True), fd)
    os.close(fd)


def block(number: int, file: int = 7) -> Key:
    return 1, file, number * BLOCK_BYTES, 99


def want(table: Table, reader: Reader, *blocks: Key) -> Look:
    """What it gets, once those that are its own to read were read."""
    found = table.look(dict(enumerate(blocks)), reader)
    table.release(found.mine, found.mine)
    return found


def there(table: Table) -> list[int]:
    """The numbers of the blocks, by slot."""
    return [table.entry(slot).key[2] // BLOCK_BYTES for slot in range(SLOTS)]


def test_a_slot_is_used_again_when_nobody_wants_its_block_any_more(table: Table) -> None:
    reader = Reader()
    for number in range(10):
        assert list(want(table, reader, block(number)).mine) == [0]
    assert sorted(there(table)) == [6, 7, 8, 9]
    assert want(table, reader, block(9)).here.keys() == {0}


def test_who_is_close_behind_is_waited_for(table: Table) -> None:
    slow, fast = Reader(), Reader()
    want(table, slow, block(0), block(1))
    for number in range(4):
        want(table, fast, block(number))
    found = want(table, fast, block(4))
    assert (found.here, found.mine) == ({}, {})
    assert table.look_ahead({0: block(5)}) == {}
    thread = threading.Thread(target=lambda: (time.sleep(0.1), want(table, slow, block(1))))
    began = time.monotonic()
    thread.start()
    table.await_change(found)
    thread.join()
    assert time.monotonic() - began < 20
    assert [claim.slot for claim in want(table, fast, block(4), block(5)).mine.values()] == [0]
    assert there(table) == [4, 1, 2, 3]


def test_who_has_all_is_not_waited_for(table: Table) -> None:
    slow, fast = Reader(), Reader()
    want(table, slow, block(0))
    for number in range(4):
        want(table, fast, block(number))
    found = want(table, fast, block(4))
    assert not found.mine
    table.leave(slow)
    began = time.monotonic()
    table.await_change(found)
    assert time.monotonic() - began < 20
    assert len(want(table, fast, *map(block, range(4, 8))).mine) == 4


def test_who_does_not_move_is_not_waited_for(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_table, "_SEEN_S", 0.1)
    stopped, fast = Reader(), Reader()
    began = time.monotonic()
    want(table, stopped, block(0))
    for number in range(4):
        want(table, fast, block(number))
    while not (found := want(table, fast, block(4))).mine:
        table.await_change(found)
    assert 0.1 < time.monotonic() - began < 20
    monkeypatch.setattr(block_table, "_SEEN_S", 30.0)
    assert want(table, stopped, block(1)).here.keys() == {0}  # it goes on, and is waited for
    assert not want(table, fast, *map(block, range(5, 9))).mine.keys() - {0}


def test_the_hindmost_one_gets_a_slot_at_once_of_those_that_are_wanted_last(table: Table) -> None:
    late, fast = Reader(), Reader()
    want(table, fast, *map(block, range(2, 6)))
    found = want(table, late, block(0), block(1))
    assert len(found.mine) == 2
    assert sorted(there(table)) == [0, 1, 2, 3]
    assert not table.look_ahead({0: block(9)})  # not wanted yet: others are not made to read theirs again for it
    assert want(table, late, block(2), block(3)).here.keys() == {0, 1}


@pytest.mark.parametrize("other", [block(0, file=8), block(100)])
def test_who_is_in_another_file_or_far_behind_holds_up_nobody(
    table: Table, other: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_table, "_NEAR_BYTES", 20 * BLOCK_BYTES)
    one, another = Reader(), Reader()
    want(table, one, block(0))
    for number in range(30):
        key = (*other[:2], other[2] + number * BLOCK_BYTES, 99)
        assert len(want(table, another, key).mine) == 1
    assert len(want(table, one, block(1)).mine) == 1


def test_more_readers_than_there_are_entries_are_not_waited_for(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_table, "READERS", 1)
    fast, slow = Reader(), Reader()
    want(table, fast, block(0))
    want(table, slow, block(0))
    assert (fast.number, slow.number) == (0, None)
    for number in range(1, 9):
        assert len(want(table, fast, block(number)).mine) == 1
    assert len(want(table, slow, block(1)).mine) == 1
    table.leave(slow)
    table.leave(fast)
    assert want(table, slow, block(2)).mine
    assert slow.number == 0


def test_entries_of_killed_readers_are_used_again(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_table, "PATIENCE_S", 0.1)
    killed = [Reader() for _ in range(block_table.READERS)]
    for reader in killed:
        want(table, reader, block(0))
    assert [reader.number for reader in killed] == list(range(block_table.READERS))
    late = Reader()
    want(table, late, block(0))
    assert late.number is None
    time.sleep(0.2)
    want(table, late, block(0))
    assert late.number is not None


def test_garbage_in_the_places_of_readers_holds_up_nobody(table: Table) -> None:
    table._memory[block_table._READERS_AT : block_table.BYTES] = os.urandom(block_table.BYTES - block_table._READERS_AT)
    reader = Reader()
    for number in range(20):
        assert len(want(table, reader, block(number)).mine) == 1
