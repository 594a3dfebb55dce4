"""Replicators as processes: snapshots of one node arrive on another whole and right, or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from resilio_hpc.ckpt.replication.messages import (
    Begin,
    Cancel,
    Fetch,
    Fetched,
    FetchFailed,
    Have,
    Miss,
    Release,
    Want,
    asking,
    giving,
)
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.core import wire
from tests.support.ckpt.replicator_process import POOL, SECRET, Replicator
from tests.support.ckpt.snapshot_node import value
from tests.support.waiting import PATIENCE_S, until


@pytest.fixture
def start() -> Iterator[Callable[..., Replicator]]:
    with tempfile.TemporaryDirectory(prefix="resilio-test-", dir="/dev/shm") as name:
        made: list[Replicator] = []

        def make(secret: str = SECRET, silent_s: float = PATIENCE_S) -> Replicator:
            made.append(Replicator(Path(name) / str(len(made)), secret, silent_s))
            return made[-1]

        yield make
        for replicator in made:
            replicator.close()


Start = Callable[..., Replicator]


def test_copies_arrive_and_come_back_to_a_new_node(start: Start) -> None:
    one, other, new = start(), start(), start()
    for rank in (0, 1):
        one.take(rank, 7, floats=3_000_000)
    answer = other.ask(Fetch(1, 7, [0, 1], 4, one.endpoint))
    assert isinstance(answer, Fetched)
    assert answer.number == 1
    assert answer.size_bytes > 24_000_000
    assert [value(other.copies, rank, 7) for rank in (0, 1)] == [7, 1007]
    assert arena.scan(other.arenas) == []
    one.process.kill()  # the node is lost
    back = Fetch(2, 7, [0, 1], 4, other.endpoint, into_arenas=True, first_rank=0, local_world_size=2)
    assert isinstance(new.ask(back), Fetched)
    assert [value(new.arenas, rank, 7) for rank in (0, 1)] == [7, 1007]
    pinned = arena.pin(new.arenas, 7)  # as snapshots of its own: complete, and nobody else writes to them
    assert pinned is not None
    pinned.release()
    assert new.take(0, 8).held(7) is not None


def test_the_last_whole_copy_stays_while_the_next_one_comes(start: Start) -> None:
    one, other = start(), start()
    for step in (1, 2, 3):
        one.take(0, step, floats=200_000)
        assert isinstance(other.ask(Fetch(step, step, [0], 4, one.endpoint)), Fetched)
    assert sorted(held.step for held in arena.scan(other.copies)) == [2, 3]
    one.take(0, 4, floats=20_000_000)
    os.kill(one.process.pid, signal.SIGSTOP)
    other.send(Fetch(4, 4, [0], 4, one.endpoint))
    assert other.says_nothing(0.2)
    assert value(other.copies, 0, 3) == 3
    os.kill(one.process.pid, signal.SIGCONT)
    assert isinstance(other.answer(), Fetched)
    assert sorted(held.step for held in arena.scan(other.copies)) == [3, 4]


def test_a_giver_killed_half_way_leaves_the_former_copy(start: Start) -> None:
    one, other = start(), start()
    one.take(0, 1, floats=40_000_000)
    answer = other.ask(Fetch(1, 1, [0], 4, one.endpoint))
    assert isinstance(answer, Fetched)
    one.take(0, 2, floats=40_000_000)
    other.send(Fetch(2, 2, [0], 4, one.endpoint))
    until(lambda: arena.WRITING in states(other.copies), "a copy is under way", poll_s=0)
    os.kill(other.process.pid, signal.SIGSTOP)  # so that not all has come when the other is dead
    one.process.kill()
    one.process.wait()
    os.kill(other.process.pid, signal.SIGCONT)
    failed = other.answer()
    assert isinstance(failed, FetchFailed)
    assert failed.error == f"{one.endpoint} hung up"
    assert value(other.copies, 0, 1) == 1
    assert [held.step for held in arena.scan(other.copies)] == [1]


def states(directory: Path) -> list[bytes]:
    found = []
    for path in directory.glob("rank*.slot*"):
        with path.open("rb") as file:
            found.append(os.pread(file.fileno(), 8, arena.STATE_AT))
    return found


def test_what_is_not_there_is_said_and_the_next_fetch_works(start: Start) -> None:
    one, other = start(), start()
    one.take(0, 1)
    failed = other.ask(Fetch(1, 2, [0], 4, one.endpoint))
    assert failed == FetchFailed(1, "there is no snapshot of step 2 of rank 0")
    other.send(Fetch(2, 1, [0, 1], 4, one.endpoint))  # the second rank is not there
    assert other.answer() == FetchFailed(2, "there is no snapshot of step 1 of rank 1")
    assert isinstance(other.ask(Fetch(3, 1, [0], 4, one.endpoint)), Fetched)


def test_what_is_cancelled_has_no_answer_and_leaves_nothing(start: Start) -> None:
    one, other = start(), start()
    one.take(0, 1, floats=1000)
    os.kill(one.process.pid, signal.SIGSTOP)
    other.send(Fetch(1, 1, [0], 4, one.endpoint))
    other.send(Fetch(2, 1, [0], 4, one.endpoint))
    other.send(Cancel([1, 2]))
    os.kill(one.process.pid, signal.SIGCONT)
    assert other.says_nothing(0.3)
    assert arena.scan(other.copies) == []
    assert isinstance(other.ask(Fetch(3, 1, [0], 4, one.endpoint)), Fetched)
    os.kill(one.process.pid, signal.SIGSTOP)
    other.send(Fetch(4, 1, [0], 4, one.endpoint))
    other.send(Fetch(5, 1, [0], 4, one.endpoint))
    other.send(Cancel([4, 3]))
    os.kill(one.process.pid, signal.SIGCONT)
    answer = other.answer()
    assert isinstance(answer, Fetched)
    assert answer.number == 5


def test_a_snapshot_is_not_overwritten_while_it_is_read(start: Start) -> None:
    one = start()
    pair = one.take(0, 1)
    with reader(one) as ask:
        assert isinstance(ask(Want(0, 1, 4)), Have)
        for step in (2, 3, 4):
            Snapshot(pair, step, flatten({"w": np.zeros(10)}), POOL).finish()
        assert {held.step for held in arena.scan(one.arenas)} == {1, 4}
        ask(Release(), answer=False)
        assert isinstance(ask(Want(0, 1, 4)), Have)
        ask(Release(), answer=False)
        assert isinstance(ask(Want(0, 9, 4)), Miss)  # and by now the first one is released
        Snapshot(pair, 5, flatten({"w": np.zeros(10)}), POOL).finish()
        assert {held.step for held in arena.scan(one.arenas)} == {4, 5}


class reader:
    """Somebody who asks a replicator by hand."""

    def __init__(self, node: Replicator, secret: str = SECRET) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        keys = wire.Keys.derive(secret.encode())
        self.socket = wire.call(self.context, keys, node.endpoint, b"reader")

    def __enter__(self) -> Callable[..., object]:
        def ask(message: Want | Release | None, answer: bool = True) -> object:
            """``None``: only wait for what was asked before."""
            if message is not None:
                self.socket.send(asking.encode(message))
            if not answer:
                return None
            assert self.socket.poll(1000 * PATIENCE_S)
            return giving.decode(self.socket.recv_multipart()[0])

        return ask

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)


def test_who_asks_because_of_a_round_waits_until_the_other_node_has_begun_it(start: Start) -> None:
    one = start()
    pair = one.take(0, 1)
    with reader(one) as ask:
        one.send(Begin((1, 4), []))
        assert isinstance(ask(Want(0, 1, 4, life=(1, 4))), Have)
        ask(Want(0, 1, 4, life=(1, 6)), answer=False)
        one.send(Begin((1, 5), []))
        time.sleep(0.5)
        Snapshot(pair, 2, flatten({"w": np.zeros(10)}), POOL).finish()
        arena.invalidate(one.arenas, 1)
        one.send(Begin((1, 6), []))
        assert isinstance(ask(None), Miss)  # what was there before is of another life


def test_copies_of_a_life_that_is_over_are_forgotten(start: Start) -> None:
    one, other = start(), start()
    one.take(0, 1)
    one.take(1, 1)
    assert isinstance(other.ask(Fetch(1, 1, [0, 1], 4, one.endpoint)), Fetched)
    other.send(Begin((1, 1), [(1, 1)]))
    with reader(other) as ask:
        assert isinstance(ask(Want(1, 1, 4, life=(1, 1))), Have)
        assert isinstance(ask(Want(0, 1, 4)), Miss)


def test_another_run_gets_nothing_and_garbage_does_no_harm(start: Start) -> None:
    one, stranger = start(), start(wire.new_secret().decode(), silent_s=0.5)
    one.take(0, 1)
    stranger.send(Fetch(1, 1, [0], 4, one.endpoint))
    with reader(one) as ask:
        assert isinstance(ask(Want(0, 1, 4)), Have)
    keys = wire.Keys.derive(SECRET.encode())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = wire.call(context, keys, one.endpoint, b"x")
    for frames in ([b""], [b"\x01\xff"], [b"a", b"b", b"c"], [b"\x01" + b"\x90" * 100_000]):
        socket.send_multipart(frames)
    socket.send(asking.encode(Want(0, 1, 4)))
    assert socket.poll(1000 * PATIENCE_S)
    assert isinstance(giving.decode(socket.recv_multipart()[0]), Have)
    context.destroy(linger=0)
    failed = stranger.answer()
    assert isinstance(failed, FetchFailed)
    assert arena.scan(stranger.copies) == []


def test_copies_of_ranks_that_are_kept_elsewhere_now_are_removed(start: Start) -> None:
    one, other = start(), start()
    for rank in (0, 1, 2):
        one.take(rank, 1)
    assert isinstance(other.ask(Fetch(1, 1, [0, 1], 4, one.endpoint)), Fetched)
    assert isinstance(other.ask(Fetch(2, 1, [1, 2], 4, one.endpoint)), Fetched)
    assert sorted({int(path.name[4]) for path in other.copies.iterdir()}) == [1, 2]


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "argv = [sys.executable, '-m', 'resilio_hpc.ckpt.replication.replicator']\n"
        "p = subprocess.Popen(argv, stdin=subprocess.PIPE)\n"
        "print(p.pid, flush=True); time.sleep(1000)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: is_over(child), "it ends, too")


def is_over(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]
    except OSError:
        return True
