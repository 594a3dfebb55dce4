"""Replica copies, with real replicators: of a snapshot whose tensors are here little is kept, and all comes back."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
import pytest
import zmq

from resilio_hpc.ckpt import Slab
from resilio_hpc.ckpt.replication.messages import Begin, Fetch, Fetched, FetchFailed, Miss, Want, asking, giving
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.core import wire
from tests.support.ckpt.replicator_process import POOL, Replicator
from tests.support.ckpt.snapshot_node import content
from tests.support.waiting import PATIENCE_S

WORLD = 4  # ranks 0 and 1 on one node, 2 and 3 on the other
MB = 1_000_000
State = Callable[[int, int], dict[str, Any]]
Start = Callable[[], Replicator]


@pytest.fixture
def start() -> Iterator[Start]:
    with tempfile.TemporaryDirectory(prefix="resilio-test-", dir="/dev/shm") as name:
        made: list[Replicator] = []

        def make() -> Replicator:
            made.append(Replicator(Path(name) / str(len(made))))
            return made[-1]

        yield make
        for replicator in made:
            replicator.close()


def plain(rank: int, step: int) -> dict[str, Any]:
    """A state of data parallel training: what differs are a generator, a position, and statistics of batches."""
    draw = np.random.default_rng(step)
    return {
        "model": {"weight": draw.random(MB, dtype=np.float32), "bias": draw.random(7), "none": np.zeros(0)},
        "mean": np.full(10, rank + step),
        "random": np.random.default_rng(rank).bytes(5000),
        "position": {"epoch": step, "seen": rank * 1000},
    }


def save(node: Replicator, state: State, step: int, layout: Literal["own", "replicated"] = "replicated") -> None:
    first = 0 if node.arenas.parent.name == "0" else 2
    for rank in (first, first + 1):
        pair = ArenaPair(node.arenas, Owner(rank, rank % 2, WORLD, 2, 0, layout, "run"), node.spill)
        Snapshot(pair, step, flatten(state(rank, step)), POOL).finish()


def kept(other: Replicator, one: Replicator, step: int, number: int = 1) -> Fetched | FetchFailed:
    answer = other.ask(Fetch(number, step, [0, 1], WORLD, one.endpoint, as_replicas=True))
    assert isinstance(answer, Fetched | FetchFailed)
    return answer


def lose(node: Replicator) -> None:
    arena.remove_slots(node.arenas)


def bring(new: Replicator, other: Replicator, step: int) -> Fetched | FetchFailed:
    answer = new.ask(Fetch(9, step, [0, 1], WORLD, other.endpoint, into_arenas=True, first_rank=0, local_world_size=2))
    assert isinstance(answer, Fetched | FetchFailed)
    return answer


def test_a_lost_nodes_snapshots_are_made_of_a_little_copy_and_the_replicas(start: Start) -> None:
    one, other = start(), start()
    for node in (one, other):
        save(node, plain, 5)
    before = [content(one.arenas, rank, 5) for rank in (0, 1)]
    answer = kept(other, one, 5)
    assert isinstance(answer, Fetched)
    assert answer.size_bytes < 20_000  # of 8 MB
    lose(one)
    assert isinstance(bring(one, other, 5), Fetched)
    assert [content(one.arenas, rank, 5) for rank in (0, 1)] == before


def test_replicas_of_sharded_tensors_are_found_by_their_content(start: Start) -> None:
    def shard(rank: int, step: int) -> dict[str, Any]:
        part, replica = rank % 2, rank // 2
        values = np.random.default_rng(10 * step + part).random(MB // 2, dtype=np.float32)
        return {"weight": Slab(values, (MB,), (part * MB // 2,), replica), "rank": rank}

    one, other = start(), start()
    for node in (one, other):
        save(node, shard, 5, "own")
    before = [content(one.arenas, rank, 5) for rank in (0, 1)]
    answer = kept(other, one, 5)
    assert isinstance(answer, Fetched)
    assert answer.size_bytes < 5_000
    lose(one)
    assert isinstance(bring(one, other, 5), Fetched)
    assert [content(one.arenas, rank, 5) for rank in (0, 1)] == before


def test_of_what_no_other_node_has_only_a_little_is_copied(start: Start) -> None:
    def mine(rank: int, step: int) -> dict[str, Any]:
        return {"shard": np.full(5 * MB, rank, dtype=np.float32)}

    one, other = start(), start()
    for node in (one, other):
        save(node, mine, 5, "own")
    answer = kept(other, one, 5)
    assert isinstance(answer, FetchFailed)
    assert answer.no_replicas
    assert "20 MB of rank 0's snapshot, in 3 pieces, are on no other node" in answer.error


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))])
def test_whatever_differs_comes_back_bit_for_bit(start: Start, seed: int) -> None:
    sizes = [0, 1, 63, 64, 4095, 4096, 4097, 100_000, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 * (1 << 20) + 5]

    def drawn(rank: int, step: int) -> dict[str, Any]:
        common, own = Random(seed), Random(f"{seed} {rank}")
        found: dict[str, Any] = {"rank": "x" * own.randrange(3000)}
        for number in range(common.randrange(1, 40)):
            bits = common.randbytes(common.choice(sizes))
            if common.random() < 0.2 and bits:
                at = common.randrange(len(bits))
                bits = bits[:at] + bytes([own.randrange(256)]) + bits[at + 1 :]
            if common.random() < 0.1 and own.random() < 0.5:
                continue  # a tensor that not all ranks have
            found[f"t{number}"] = np.frombuffer(bits, dtype=np.uint8)
        return found

    one, other = start(), start()
    for node in (one, other):
        save(node, drawn, 5)
    before = [content(one.arenas, rank, 5) for rank in (0, 1)]
    assert isinstance(kept(other, one, 5), Fetched)
    lose(one)
    assert isinstance(bring(one, other, 5), Fetched)
    assert [content(one.arenas, rank, 5) for rank in (0, 1)] == before


def test_a_copy_is_given_while_the_snapshots_that_it_relies_on_are_there(start: Start) -> None:
    one, other = start(), start()
    for number, step in enumerate((5, 6, 7)):
        for node in (one, other):
            save(node, plain, step)
        assert isinstance(kept(other, one, step, number), Fetched)
    for step in (6, 7):
        lose(one)
        assert isinstance(bring(one, other, step), Fetched)
    for step in (5, 8):  # what it relies on is gone; there never was one
        answer = bring(one, other, step)
        assert isinstance(answer, FetchFailed)
        assert answer.error[:-1] == f"there is no snapshot of step {step} of rank "


def test_the_same_step_of_another_life_is_no_replica(start: Start) -> None:
    def again(rank: int, step: int) -> dict[str, Any]:
        return {**plain(rank, step), "mean": np.full(10, 99.0)}

    one, other = start(), start()
    for node in (one, other):
        save(node, plain, 5)
    assert isinstance(kept(other, one, 5), Fetched)
    save(other, again, 5)  # a snapshot that is named alike
    lose(one)
    assert isinstance(bring(one, other, 5), FetchFailed)


def test_copies_that_do_not_belong_to_a_life_are_dropped(start: Start) -> None:
    one, other = start(), start()
    for node in (one, other):
        save(node, plain, 5)
    assert isinstance(kept(other, one, 5), Fetched)
    other.send(Begin((1, 1), [(0, 5)]))
    assert isinstance(other.ask(Fetch(3, 4, [0], WORLD, one.endpoint)), FetchFailed)  # it has taken the former message
    lose(one)
    answer = bring(one, other, 5)
    assert isinstance(answer, FetchFailed)
    assert answer.error == "there is no snapshot of step 5 of rank 1"


def test_a_node_without_that_step_keeps_nothing_of_it(start: Start) -> None:
    one, other = start(), start()
    save(one, plain, 5)
    answer = kept(other, one, 5)
    assert isinstance(answer, FetchFailed)
    assert answer.error == "this node has no snapshot of step 5"
    assert not answer.no_replicas


def test_a_damaged_table_and_ranges_outside_of_a_snapshot_do_no_harm(start: Start) -> None:
    one, other = start(), start()
    for node in (one, other):
        save(node, plain, 5)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        keys = wire.Keys.derive(one.secret.encode())
        for ranges in (((0, 1 << 40),), ((-5, 10),), ((1 << 61, 1),), ((4096, 1 << 20),) * 17):
            asked = wire.call(context, keys, one.endpoint, b"reader")
            wire.send(asked, [asking.encode(Want(0, 5, WORLD, ranges=ranges))])
            assert asked.poll(PATIENCE_S * 1000)
            assert isinstance(giving.decode(asked.recv_multipart()[0]), Miss)
            asked.close(0)
    finally:
        context.destroy(linger=0)
    (held,) = [held for held in arena.scan(one.arenas) if held.rank == 0]
    header = arena.read_header(held.path)
    assert header is not None
    with held.path.open("r+b") as file:
        file.seek(header.table_offset + 10)
        file.write(b"!")
    answer = kept(other, one, 5)
    assert isinstance(answer, FetchFailed)
    assert answer.error == "the table of rank 0's snapshot of step 5 is damaged"
    assert isinstance(other.ask(Fetch(3, 5, [1], WORLD, one.endpoint, as_replicas=True)), Fetched)
