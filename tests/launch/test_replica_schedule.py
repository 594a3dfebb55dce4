"""Without ``--partner-copies``: which runs keep replica copies, of which steps, and what they are good for."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from resilio_hpc.ckpt.replication.replica_copies import LEAST_BYTES
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.launch.agent.snapshots.replica_schedule import AGAIN_S
from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.message_parts import Partner
from resilio_hpc.launch.workers.local_round import LocalRound
from tests.support.ckpt.snapshot_node import content
from tests.support.launch.copying_node import MEMBERS, Node, start

LARGE = 1 + LEAST_BYTES // 4  # float32


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """Two nodes whose ranks train."""
    with tempfile.TemporaryDirectory(prefix="resilio-test-", dir="/dev/shm") as name:
        made = [Node(Path(name), rank, enabled=False) for rank in (0, 1)]
        for node in made:
            train(node)
        yield made
        for node in made:
            node.copies.close()


def train(node: Node, number: int = 0) -> None:
    node.ranks.local, _ = start(node.rank, 0, "", number)


def begin(nodes: list[Node], step: int = 1) -> None:
    """The ranks save for the first time, replicators start, and the controller says where they are."""
    for node in nodes:
        node.save(step, LARGE, rank=node.rank)
        node.copies.tick()
    for node in nodes:
        node.serve_until(lambda node=node: node.copies.port > 0)  # type: ignore[misc]
    for node, other in (nodes, nodes[::-1]):
        node.follow(other)
    for node in nodes:
        node.serve_until(lambda node=node: node.kept() == [step])  # type: ignore[misc]


def test_each_new_step_is_copied_and_a_lost_node_gets_its_own_back(nodes: list[Node]) -> None:
    one, other = nodes
    begin(nodes)
    for step in (2, 3):
        one.save(step, floats=1_000_000, rank=0)
        other.save(step, floats=1_000_000, rank=1)
        other.serve_until(lambda step=step: step in other.kept(), passes_s=AGAIN_S)  # type: ignore[misc]
    assert other.copies.held() == (m.Held(0, 2, 2, True), m.Held(0, 3, 2, True))
    (copied,) = [fields for kind, fields in other.recorded if kind == "copied"]  # the first one of a life
    assert copied["size_bytes"] < 1000
    before = content(one.arenas, 0, 3)
    arena.remove_slots(one.arenas)
    one.fetch(3, other)
    one.serve_until(lambda: one.brought == [3])
    assert content(one.arenas, 0, 3) == before


def test_a_partner_that_is_behind_is_asked_again_and_nothing_is_said(nodes: list[Node]) -> None:
    one, other = nodes
    begin(nodes)
    other.save(2, rank=1)
    other.serve_until(lambda: other.copies._copy is not None, passes_s=AGAIN_S)
    other.serve_until(lambda: other.copies._copy is None)
    assert other.kept() == [1]
    one.save(2, rank=0)
    other.serve_until(lambda: other.kept() == [1, 2], passes_s=AGAIN_S)
    assert other.told("copy_failed") == 0


def test_copies_count_while_this_nodes_own_snapshots_of_the_step_are_there(nodes: list[Node]) -> None:
    _, other = nodes
    begin(nodes)
    for step in (2, 3):
        other.save(step, rank=1)  # the partner hangs
    assert other.kept() == []


def test_where_each_ranks_tensors_are_its_own_it_is_said_once_and_over(nodes: list[Node]) -> None:
    one, other = nodes
    for node in nodes:
        node.save(1, mine=np.full(5_000_000, node.rank, dtype=np.float32))
        node.copies.tick()
    for node in nodes:
        node.serve_until(lambda node=node: node.copies.port > 0)  # type: ignore[misc]
    other.keep(1, one)
    other.serve_until(lambda: other.told("copy_failed") == 1)
    assert (other.copies.port, other.copies.link.fileno(), other.kept()) == (0, None, [])
    other.save(2, mine=np.full(5_000_000, 5, dtype=np.float32))
    other.now += 10.0
    other.copies.tick()
    assert other.copies.link.fileno() is None


def test_a_new_life_drops_later_steps_and_names_the_partner_again(nodes: list[Node]) -> None:
    one, other = nodes
    begin(nodes)
    for node in nodes:
        node.save(2, rank=node.rank)
    other.serve_until(lambda: other.kept() == [1, 2], passes_s=AGAIN_S)
    for node in nodes:
        arena.invalidate(node.arenas, 2)
        node.copies.begin((1, 1), 1)
        train(node, 1)
    assert other.kept() == [1]
    for node in nodes:
        node.save(2, rank=node.rank)
    other.now += 10.0
    other.copies.tick()
    assert other.copies._copy is None  # who the partner is must be said first
    other.follow(one, number=1)
    other.serve_until(lambda: other.kept() == [1, 2])


def test_copies_end_with_their_replicator(nodes: list[Node]) -> None:
    one, other = nodes
    begin(nodes)
    os.kill(other.pid, signal.SIGKILL)
    other.serve_until(lambda: other.told("replicator_died") == 1 and other.copies.port > 0)
    assert other.kept() == []
    other.keep(1, one)
    other.serve_until(lambda: other.kept() == [1])


@pytest.mark.parametrize("why", ["one node", "nothing saved", "observe", "own tensors", "little"])
def test_where_there_are_no_replicas_nothing_runs(tmp_path: Path, why: str) -> None:
    node = Node(tmp_path, 0, enabled=False, mode=Mode.OBSERVE if why == "observe" else Mode.RECOVER)
    train(node)
    if why == "one node":
        alone = m.RoundState(1, 0, m.world_of(MEMBERS[:1]), 0, 0, ())
        node.ranks.local = LocalRound("n1", alone, MEMBERS[0], None)
    if why == "own tensors":
        node.save_own(1, LARGE)
    elif why != "nothing saved":
        node.save(1, 1000 if why == "little" else LARGE)
    node.copies.tick()
    node.copies.keep(m.PersistStep(1, 0, 5, Partner(1, 1, "127.0.0.1:1")), 2)
    assert (node.copies.port, node.copies.link.fileno(), node.copies.held()) == (0, None, ())
    node.copies.close()


def test_an_order_that_comes_before_this_nodes_first_snapshot_is_kept(nodes: list[Node]) -> None:
    one, other = nodes
    one.save(1, LARGE, rank=0)
    one.copies.tick()
    one.serve_until(lambda: one.copies.port > 0)
    other.follow(one)
    other.save(1, LARGE, rank=1)
    other.serve_until(lambda: other.kept() == [1])


def test_a_step_that_is_written_is_copied_at_once(nodes: list[Node]) -> None:
    one, other = nodes
    begin(nodes)
    for node in nodes:
        node.save(2, rank=node.rank)
    other.keep(2, one)
    other.serve_until(lambda: other.kept() == [1, 2])


def test_a_spare_that_takes_a_lost_nodes_place_starts_a_replicator_for_it(nodes: list[Node], tmp_path: Path) -> None:
    _, other = nodes
    begin(nodes)
    spare = Node(tmp_path, 0, enabled=False)
    spare.fetch(1, other)
    spare.serve_until(lambda: spare.brought == [1])
    assert [(held.rank, held.step) for held in arena.scan(spare.arenas)] == [(0, 1)]
    spare.copies.close()
