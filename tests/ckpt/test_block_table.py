"""Which slot is used next: nobody is overrun who is close behind, and nobody is waited for who does not move."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from resilio_hpc.ckpt.format.manifest import BLOCK_BYTES
from resilio_hpc.ckpt.restore import block_table
from resilio_hpc.ckpt.restore.block_table import BlockTable, Key, Look, Reader, RingLimits
from resilio_hpc.native import map_shared
from tests.support.waiting import PATIENCE_S, until

SLOTS = 4


@pytest.fixture
def seen_with() -> Iterator[Callable[..., BlockTable]]:
    """The same table as often as it is called for, with other limits."""
    fd = os.memfd_create("table")
    os.truncate(fd, block_table.BYTES)
    memory = map_shared(fd, block_table.BYTES, True)
    patient = {"slots": SLOTS, "seen_s": PATIENCE_S, "patience_s": PATIENCE_S, "lock_patience_s": PATIENCE_S}
    yield lambda **limits: BlockTable(memory, fd, RingLimits(**{**patient, **limits}))
    os.close(fd)


@pytest.fixture
def table(seen_with: Callable[..., BlockTable]) -> BlockTable:
    """Readers are alive for as long as the test takes; a reader that waits is woken, or the test hangs."""
    return seen_with()


def block(number: int, file: int = 7) -> Key:
    return 1, file, number * BLOCK_BYTES, 99


def want(table: BlockTable, reader: Reader, *blocks: Key) -> Look:
    """What it gets, once those that are its own to read were read."""
    found = table.look(dict(enumerate(blocks)), reader)
    table.release(found.mine, found.mine)
    return found


def there(table: BlockTable) -> list[int]:
    """The numbers of the blocks, by slot."""
    return [table.entry(slot).key[2] // BLOCK_BYTES for slot in range(SLOTS)]


def test_a_slot_is_used_again_when_nobody_wants_its_block_any_more(table: BlockTable) -> None:
    reader = Reader()
    for number in range(10):
        assert list(want(table, reader, block(number)).mine) == [0]
    assert sorted(there(table)) == [6, 7, 8, 9]
    assert want(table, reader, block(9)).here.keys() == {0}


def test_who_is_close_behind_is_waited_for(table: BlockTable) -> None:
    slow, fast = Reader(), Reader()
    want(table, slow, block(0), block(1))
    for number in range(4):
        want(table, fast, block(number))
    found = want(table, fast, block(4))
    assert (found.here, found.mine) == ({}, {})
    assert table.look_ahead({0: block(5)}) == {}
    thread = threading.Thread(target=lambda: want(table, slow, block(1)))
    thread.start()
    table.await_change(found)
    thread.join()
    assert [claim.slot for claim in want(table, fast, block(4), block(5)).mine.values()] == [0]
    assert there(table) == [4, 1, 2, 3]


def test_who_has_all_is_not_waited_for(table: BlockTable) -> None:
    slow, fast = Reader(), Reader()
    want(table, slow, block(0))
    for number in range(4):
        want(table, fast, block(number))
    found = want(table, fast, block(4))
    assert not found.mine
    table.leave(slow)
    table.await_change(found)
    assert len(want(table, fast, *map(block, range(4, 8))).mine) == 4


def test_who_does_not_move_is_not_waited_for(table: BlockTable, seen_with: Callable[..., BlockTable]) -> None:
    stopped, fast = Reader(), Reader()
    want(table, stopped, block(0))
    for number in range(4):
        want(table, fast, block(number))
    assert not want(table, fast, block(4)).mine
    hasty = seen_with(seen_s=0.1)
    while not (found := want(hasty, fast, block(4))).mine:
        hasty.await_change(found)
    assert want(table, stopped, block(1)).here.keys() == {0}  # it goes on, and is waited for
    assert not want(table, fast, *map(block, range(5, 9))).mine.keys() - {0}


def test_the_hindmost_one_gets_a_slot_at_once_of_those_that_are_wanted_last(table: BlockTable) -> None:
    late, fast = Reader(), Reader()
    want(table, fast, *map(block, range(2, 6)))
    found = want(table, late, block(0), block(1))
    assert len(found.mine) == 2
    assert sorted(there(table)) == [0, 1, 2, 3]
    assert not table.look_ahead({0: block(9)})  # not wanted yet: others are not made to read theirs again for it
    assert want(table, late, block(2), block(3)).here.keys() == {0, 1}


@pytest.mark.parametrize("other", [block(0, file=8), block(100)])
def test_who_is_in_another_file_or_far_behind_holds_up_nobody(other: Key, seen_with: Callable[..., BlockTable]) -> None:
    table = seen_with(near_bytes=20 * BLOCK_BYTES)
    one, another = Reader(), Reader()
    want(table, one, block(0))
    for number in range(30):
        key = (*other[:2], other[2] + number * BLOCK_BYTES, 99)
        assert len(want(table, another, key).mine) == 1
    assert len(want(table, one, block(1)).mine) == 1


def test_more_readers_than_there_are_entries_are_not_waited_for(seen_with: Callable[..., BlockTable]) -> None:
    table = seen_with(readers=1)
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


def test_entries_of_killed_readers_are_used_again(table: BlockTable, seen_with: Callable[..., BlockTable]) -> None:
    killed = [Reader() for _ in range(block_table.READERS)]
    for reader in killed:
        want(table, reader, block(0))
    assert [reader.number for reader in killed] == list(range(block_table.READERS))
    late = Reader()
    want(table, late, block(0))
    assert late.number is None
    hasty = seen_with(patience_s=0.01)

    def has_entry() -> bool:
        want(hasty, late, block(0))
        return late.number is not None

    until(has_entry, "an entry of a killed one is used")


def test_garbage_in_the_places_of_readers_holds_up_nobody(table: BlockTable) -> None:
    table._memory[block_table._READERS_AT : block_table.BYTES] = os.urandom(block_table.BYTES - block_table._READERS_AT)
    reader = Reader()
    for number in range(20):
        assert len(want(table, reader, block(number)).mine) == 1
