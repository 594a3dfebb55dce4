"""Records of boundaries: whole or nothing whenever their writer is killed, and on their way to another node."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resilio_hpc.ckpt.format.pages import PAGE
from resilio_hpc.ckpt.replication import lost_ranks
from resilio_hpc.ckpt.replication.boundary_records import RecordFeed
from resilio_hpc.ckpt.replication.messages import Fetch, Fetched, FetchFailed, Follow, LostMade, MakeLost, WantRecords
from resilio_hpc.ckpt.restore.borrowed_source import BorrowedSource
from resilio_hpc.ckpt.restore.restore import restore
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.boundary_record import (
    ROOM,
    BoundaryRecord,
    RecordWriter,
    read_records,
    record_path,
)
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.own_part import own_part
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint
from tests.support.ckpt.lent_states import WORLD, is_state, lent, record, restored, save, state, whole_step
from tests.support.ckpt.replicator_process import POOL, Replicator
from tests.support.waiting import until


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="resilio-test-", dir="/dev/shm") as name:
        yield Path(name)


def steps(directory: Path, rank: int = 0) -> list[tuple[int, bool, bytes]]:
    return [(one.step, one.is_early, one.part) for one in read_records(record_path(directory, rank))]


def test_the_last_two_boundaries_and_what_came_before_the_optimizer_are_there(memory: Path) -> None:
    writer = RecordWriter(memory, 0, WORLD, 3)
    for step in range(5, 8):
        writer.write(step, b"early%d" % step, True)
        writer.write(step, b"step%d" % step, False)
    writer.write(8, b"early8", True)
    assert steps(memory) == [(6, False, b"step6"), (7, False, b"step7"), (8, True, b"early8")]
    writer.write(8, b"x" * ROOM, False)  # too large
    assert steps(memory)[-1] == (8, True, b"early8")
    known = {record.stamp for record in read_records(record_path(memory, 0))}
    assert read_records(record_path(memory, 0), known) == []
    RecordWriter(memory, 0, WORLD, 4)  # of another life
    assert steps(memory) == []
    assert steps(memory, rank=1) == []


def test_of_two_records_of_a_step_the_boundarys_counts(memory: Path) -> None:
    writer = RecordWriter(memory, 0, WORLD, 3)
    writer.write(4, b"late", False)
    writer.write(4, b"early", True)
    records = read_records(record_path(memory, 0))
    assert lost_ranks.record_of(records, 4, 3, WORLD) == BoundaryRecord(4, WORLD, 3, False, b"late")
    assert lost_ranks.record_of(records, 4, 2, WORLD) is None
    assert lost_ranks.record_of(records, 4, 3, WORLD + 1) is None


def test_damage_anywhere_loses_that_record_alone(memory: Path) -> None:
    writer = RecordWriter(memory, 0, WORLD, 3)
    writer.write(4, b"four" * 20, False)
    writer.write(5, b"five" * 20, False)
    path = record_path(memory, 0)
    whole = path.read_bytes()
    for at in range(ROOM, ROOM + 44 + 80):  # the record of step 5
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        assert [step for step, *_ in steps(memory)] == [4]
    path.write_bytes(whole[: ROOM + 50])
    assert [step for step, *_ in steps(memory)] == [4]


def _write_for_ever(directory: Path) -> None:
    writer = RecordWriter(directory, 0, WORLD, 0)
    step = 0
    while True:
        writer.write(step, b"%08d" % step * 5000, step % 3 == 0)
        step += 1


def test_a_writer_killed_at_any_instant_leaves_whole_records(memory: Path) -> None:
    fork = multiprocessing.get_context("fork")
    for trial in range(15):
        record_path(memory, 0).unlink(missing_ok=True)  # of the writer before
        writer = fork.Process(target=_write_for_ever, args=(memory,))
        writer.start()
        until(lambda: len(steps(memory)) == 3, "records")
        time.sleep(0.001 * trial)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        found = steps(memory)
        assert len(found) >= 2
        assert all(part == b"%08d" % step * 5000 for step, _, part in found)


# -- snapshots of lost ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("early", [False, True])
def test_a_lost_ranks_state_is_another_ranks_and_its_own_record(memory: Path, early: bool) -> None:
    for rank in (0, 1):
        save(memory, rank, 5)
    record(memory, 1, 6, early=early)
    save(memory, 0, 6)
    assert whole_step(memory) == (6, [1])
    assert lent(memory) == [(1, 6)]
    for rank, step in ((0, 5), (1, 5), (0, 6), (1, 6)):
        assert is_state(restored(memory, rank, step), rank, step)


def test_what_was_lent_is_not_overwritten_while_it_is_read(memory: Path) -> None:
    record(memory, 1, 6)
    save(memory, 0, 6)
    found = lost_ranks.borrowed(memory, 1, 6, WORLD)
    assert found is not None
    with BorrowedSource(found) as source:
        for step in (7, 8, 9):
            save(memory, 0, step)
        assert is_state(restore(source, None, POOL), 1, 6)


def test_what_is_gone_or_damaged_is_not_lent(memory: Path) -> None:
    record(memory, 1, 6)
    save(memory, 0, 6)
    found = lost_ranks.borrowed(memory, 1, 6, WORLD)
    assert found is not None
    arena.mark_empty(found.holder.path, 6)
    with pytest.raises(CorruptCheckpoint, match="gone"):
        BorrowedSource(found)
    assert lost_ranks.borrowed(memory, 1, 6, WORLD) is None
    assert lent(memory) == []


def test_the_step_that_a_round_began_with_is_found_though_its_snapshots_are_of_an_earlier_one(memory: Path) -> None:
    save(memory, 0, 6)
    record(memory, 1, 6)
    assert whole_step(memory, life=1) == (-1, [])
    assert lost_ranks.whole_step(memory, (0, 1), 1, began_with=6) == (6, [1])
    assert lost_ranks.whole_step(memory, (0, 1), 1, began_with=5) == (-1, [])


def test_damage_of_a_tensor_is_seen_by_who_borrows_it(memory: Path) -> None:
    record(memory, 1, 6)
    save(memory, 0, 6)
    found = lost_ranks.borrowed(memory, 1, 6, WORLD)
    assert found is not None
    with found.holder.path.open("r+b") as file:
        file.seek(PAGE + 1000)
        file.write(b"damage")
    with BorrowedSource(found) as source, pytest.raises(CorruptCheckpoint):
        restore(source, None, POOL)


def test_ranks_a_step_apart_meet_at_the_earlier_one(memory: Path) -> None:
    record(memory, 0, 6, 7)  # it has finished step 7, which the other one waited in
    record(memory, 1, 5, 6)
    save(memory, 0, 7)
    save(memory, 1, 6)
    assert whole_step(memory) == (6, [0])
    assert is_state(restored(memory, 0, 6), 0, 6)
    assert is_state(restored(memory, 1, 6), 1, 6)


def test_without_what_is_a_ranks_own_nothing_is_made(memory: Path) -> None:
    save(memory, 0, 6)
    assert whole_step(memory) == (-1, [])  # there is no record
    record(memory, 1, 6, life=2)
    assert whole_step(memory) == (-1, [])  # of another life
    record(memory, 1, 4, 5)
    assert whole_step(memory) == (-1, [])  # of other steps


def test_tensors_that_are_each_ranks_own_are_not_given_to_another(memory: Path) -> None:
    record(memory, 1, 6)
    save(memory, 0, 6, layout="own")
    assert whole_step(memory) == (-1, [])
    save(memory, 1, 6, layout="own")
    assert whole_step(memory) == (6, [])


def test_a_large_tensor_that_was_another_on_each_rank_is_not_taken_from_one(memory: Path) -> None:
    def large(rank: int, step: int) -> dict[str, Any]:
        return {**state(rank, step), "noise": np.full(50_000, rank)}

    def save_large(rank: int, step: int) -> None:
        pair = ArenaPair(memory, Owner(rank, rank, WORLD, 2, 0, "replicated", "run"), memory / "spill")
        Snapshot(pair, step, flatten(large(rank, step)), POOL).finish()

    for rank in (0, 1):
        save_large(rank, 5)
    RecordWriter(memory, 1, WORLD, 0).write(6, own_part(large(1, 6)), False)
    save_large(0, 6)
    with pytest.raises(CheckpointError, match="noise is another tensor on each rank"):
        whole_step(memory)
    assert lent(memory) == []


def test_a_damaged_holder_is_an_error_and_nothing_is_lent(memory: Path) -> None:
    record(memory, 1, 6)
    save(memory, 0, 6)
    (held,) = arena.scan(memory)
    header = arena.read_header(held.path)
    assert header is not None
    with held.path.open("r+b") as file:
        file.seek(header.table_offset + 20)
        file.write(b"?")
    with pytest.raises(CheckpointError, match="damaged"):
        whole_step(memory)
    assert lent(memory) == []


# -- on another node -----------------------------------------------------------------------------------------------

Start = Callable[[], Replicator]


@pytest.fixture
def start(memory: Path) -> Iterator[Start]:
    started: list[Replicator] = []

    def make() -> Replicator:
        started.append(Replicator(memory / str(len(started))))
        return started[-1]

    yield make
    for replicator in started:
        replicator.close()


def made(node: Replicator, step: int) -> list[int]:
    answer = node.ask(MakeLost(1, step, WORLD))
    assert isinstance(answer, LostMade)
    return sorted(answer.ranks)


def test_a_lost_nodes_ranks_go_on_from_their_replicas_step(start: Start) -> None:
    one, other, new = start(), start(), start()
    other.send(Follow(one.endpoint, [0, 1]))
    writers = [record(one.arenas, rank, 7) for rank in (0, 1)]
    for rank in (2, 3):
        save(other.arenas, rank, 7)
    until(lambda: made(other, 7) == [0, 1], "the records of both ranks", lambda: made(other, 7))
    for rank, writer in enumerate(writers):
        writer.write(8, own_part(state(rank, 8)), True)
    for rank in (2, 3):
        save(other.arenas, rank, 8)
    until(lambda: made(other, 8) == [0, 1], "the newer records")
    assert made(other, 9) == []
    os.kill(one.process.pid, signal.SIGKILL)  # the node is lost
    for step in (7, 8):
        fetch = Fetch(
            step, step, [0, 1], WORLD, other.endpoint, into_arenas=True, first_rank=0, local_world_size=2
        )  # fmt: skip
        assert isinstance(new.ask(fetch), Fetched)
        assert all(is_state(restored(new.arenas, rank, step), rank, step) for rank in (0, 1))
    answer = new.ask(Fetch(9, 9, [0], WORLD, other.endpoint, into_arenas=True, first_rank=0, local_world_size=2))
    assert isinstance(answer, FetchFailed)


def test_records_are_followed_over_the_death_of_a_replicator(start: Start, memory: Path) -> None:
    one, other = start(), start()
    other.send(Follow(one.endpoint, [0]))
    record(one.arenas, 0, 7)
    save(other.arenas, 2, 7)
    until(lambda: made(other, 7) == [0], "the record")
    another = start()  # on the same node, at another port
    record(another.arenas, 0, 8)
    save(other.arenas, 2, 8)
    other.send(Follow(another.endpoint, [0]))
    until(lambda: made(other, 8) == [0], "the record of the new one")
    assert made(other, 7) == [0]  # what came before stays
    other.send(Follow(another.endpoint, [1]))
    until(lambda: made(other, 8) == [], "another rank is followed")


def test_a_caller_gets_each_record_once_and_others_are_not_kept_waiting(memory: Path) -> None:
    feed = RecordFeed(memory)
    feed.want(b"a", WantRecords((0, 1)))
    assert feed.due() == []
    writer = record(memory, 0, 3)

    def due() -> list[tuple[bytes, list[int]]]:
        found = until(feed.due, "records")
        return [(caller, [one.record.step for one in answer.records]) for caller, answer in found]

    assert due() == [(b"a", [3])]
    assert feed.due() == []  # until it asks again
    feed.want(b"a", WantRecords((0, 1)))
    feed.want(b"b", WantRecords((0,)))
    assert due() == [(b"b", [3])]
    writer.write(4, b"{}", False)
    assert due() == [(b"a", [4])]
    feed.release(b"a")
    feed.want(b"a", WantRecords((0,)))
    assert due() == [(b"a", [3, 4])]
