"""Whole fetches between replicators over libfabric's provider for TCP: what is lost, stopped, or without it."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from resilio_hpc.ckpt.replication.messages import Fetch, Fetched, FetchFailed
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.core.snapshot_transport import SnapshotTransport
from tests.support.ckpt.fabric_pair import read_by
from tests.support.ckpt.replicator_process import POOL, SECRET, Replicator
from tests.support.ckpt.snapshot_node import content, value
from tests.support.requirements import need_fabric
from tests.support.waiting import PATIENCE_S, until

Start = Callable[..., Replicator]


@pytest.fixture
def start() -> Iterator[Start]:
    need_fabric()
    with tempfile.TemporaryDirectory(prefix="resilio-test-", dir="/dev/shm") as name:
        made: list[Replicator] = []

        def make(transport: SnapshotTransport = "fabric", silent_s: float = PATIENCE_S) -> Replicator:
            made.append(Replicator(Path(name) / str(len(made)), SECRET, silent_s, transport))
            return made[-1]

        yield make
        for replicator in made:
            replicator.close()


def test_copies_are_read_and_come_back_to_a_new_node(start: Start) -> None:
    one, other, new = start(), start(), start()
    for rank in (0, 1):
        one.take(rank, 7, floats=3_000_001)
    there = other.ask(Fetch(1, 7, [0, 1], 4, one.endpoint))
    one.process.kill()  # the node is lost
    back = new.ask(Fetch(2, 7, [0, 1], 4, other.endpoint, into_arenas=True, first_rank=0, local_world_size=2))
    for answer in (there, back):
        assert isinstance(answer, Fetched)
        assert answer.by == read_by()
        assert answer.size_bytes > 24_000_000
    assert [value(new.arenas, rank, 7) for rank in (0, 1)] == [7, 1007]


def test_a_state_that_lies_in_several_snapshots_is_read_where_it_lies(start: Start) -> None:
    """A lost rank's tensors are in its partner's own snapshot, but for what is its own."""
    one, other, new = start(), start(), start()
    shared = {f"w{number}": np.full(99_991 + number, number, dtype=np.float32) for number in range(50)}
    for rank, node in enumerate((one, other)):
        pair = ArenaPair(node.arenas, Owner(rank, 0, 2, 1, 0, "replicated", "run"), node.spill)
        Snapshot(pair, 3, flatten({**shared, "random": bytes(range(100 + rank))}), POOL).finish()
    copied = other.ask(Fetch(1, 3, [0], 2, one.endpoint, as_replicas=True))
    back = new.ask(Fetch(2, 3, [0], 2, other.endpoint, into_arenas=True, first_rank=0, local_world_size=1))
    assert isinstance(copied, Fetched)
    assert isinstance(back, Fetched)
    assert (copied.by, back.by) == (read_by(), read_by())
    assert copied.size_bytes < 1 << 20 < back.size_bytes
    assert content(new.arenas, 0, 3) == content(one.arenas, 0, 3)


@pytest.mark.parametrize(("gives", "takes"), [("fabric", "tcp"), ("tcp", "fabric")])
def test_one_without_it_gives_and_takes_over_tcp(
    start: Start, gives: SnapshotTransport, takes: SnapshotTransport
) -> None:
    one, other = start(gives), start(takes)
    one.take(0, 1)
    answer = other.ask(Fetch(1, 1, [0], 4, one.endpoint))
    assert isinstance(answer, Fetched)
    assert (answer.by, value(other.copies, 0, 1)) == ("tcp", 1)


@pytest.mark.slow
def test_a_giver_killed_half_way_ends_the_fetch_and_another_one_is_read(start: Start) -> None:
    one, other, third = start(), start(), start()
    third.take(1, 5)
    for step in (1, 2):
        one.take(0, step, floats=40_000_000)
        if step == 1:
            assert isinstance(other.ask(Fetch(1, 1, [0], 4, one.endpoint)), Fetched)
    other.send(Fetch(2, 2, [0], 4, one.endpoint))
    until(lambda: under_way(other.copies), "bytes of the second step come", poll_s=0)
    os.kill(other.process.pid, signal.SIGSTOP)  # so that not all has come when the other is dead
    one.process.kill()
    one.process.wait()
    os.kill(other.process.pid, signal.SIGCONT)
    failed = other.answer()
    assert isinstance(failed, FetchFailed)
    assert failed.error.startswith(one.endpoint)
    assert value(other.copies, 0, 1) == 1
    answer = other.ask(Fetch(3, 5, [1], 4, third.endpoint))
    assert isinstance(answer, Fetched)
    assert answer.by == read_by()


def under_way(directory: Path) -> bool:
    """Whether bytes have come for a copy that is not whole yet."""
    for path in directory.glob("rank*.slot*"):
        with path.open("rb") as file:
            is_writing = os.pread(file.fileno(), 8, arena.STATE_AT) == arena.WRITING
            if is_writing and any(os.pread(file.fileno(), 64, 1 << 20)):
                return True
    return False


@pytest.mark.slow
def test_a_giver_that_is_stopped_is_waited_for_only_so_long(start: Start) -> None:
    one, other = start(), start(silent_s=2.0)
    one.take(0, 1, floats=80_000_000)
    other.send(Fetch(1, 1, [0], 4, one.endpoint))
    until(lambda: under_way(other.copies), "a copy is under way", poll_s=0)
    os.kill(one.process.pid, signal.SIGSTOP)
    answer = other.answer()
    os.kill(one.process.pid, signal.SIGCONT)
    if isinstance(answer, Fetched):
        pytest.skip("all had come before the giver was stopped")
    assert isinstance(answer, FetchFailed)
    assert answer.error == f"{one.endpoint} said nothing for 2 s"
    assert arena.scan(other.copies) == []
    again = other.ask(Fetch(2, 1, [0], 4, one.endpoint))
    assert isinstance(again, Fetched)
    assert (again.by, value(other.copies, 0, 1)) == (read_by(), 1)  # TCP was no better, so it is not preferred
