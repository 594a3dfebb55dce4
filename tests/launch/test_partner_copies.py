"""The agent's part of partner copies, with real replicators: what is kept, fetched, overtaken and given up."""

from __future__ import annotations

import os
import select
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.core.tiers import Tier
from resilio_hpc.launch.agent.snapshots import partner_copies
from resilio_hpc.launch.agent.snapshots.partner_copies import SILENT_S
from resilio_hpc.launch.protocol import messages as m
from tests.support.ckpt.fabric_pair import read_by
from tests.support.launch.copying_node import Node, start
from tests.support.requirements import need_fabric


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    with tempfile.TemporaryDirectory(prefix="resilio-test-", dir="/dev/shm") as name:
        made = [Node(Path(name), rank) for rank in (0, 1)]
        for node in made:
            node.serve_until(lambda node=node: node.copies.port > 0)  # type: ignore[misc]
        yield made
        for node in made:
            node.copies.close()


def keep_two(one: Node, other: Node) -> None:
    """Steps 1 and 2 of one are copied to the other."""
    for step in (1, 2):
        one.save(step)
        other.keep(step, one)
        other.serve_until(lambda step=step: step in other.kept())  # type: ignore[misc]


def test_a_step_that_is_written_is_copied_and_comes_back(nodes: list[Node]) -> None:
    one, other = nodes
    one.save(5)
    other.keep(5, one)
    assert other.kept() == []  # not before it is there
    other.serve_until(lambda: other.kept() == [5])
    assert other.copies.held() == (m.Held(0, 5, 2, True),)
    arena.remove(one.arenas)  # its memory is lost
    one.arenas.mkdir(exist_ok=True)
    one.fetch(5, other)
    one.serve_until(lambda: one.brought == [5])
    assert [(held.rank, held.step) for held in arena.scan(one.arenas)] == [(0, 5)]
    assert one.told("fetched") == 1


def test_two_steps_are_kept_and_the_older_one_goes_before_the_next_comes(nodes: list[Node]) -> None:
    one, other = nodes
    keep_two(one, other)
    assert other.kept() == [1, 2]
    one.save(3)
    other.keep(3, one)
    assert other.kept() == [2]
    other.serve_until(lambda: other.kept() == [2, 3])
    other.keep(3, one)  # said again: it is here
    assert other.kept() == [2, 3]


def test_a_copy_that_is_overtaken_is_given_up_and_one_that_fails_is_said(nodes: list[Node]) -> None:
    one, other = nodes
    one.save(1)
    os.kill(one.pid, signal.SIGSTOP)
    other.keep(1, one)
    one.save(2)
    other.keep(2, one)
    os.kill(one.pid, signal.SIGCONT)
    other.serve_until(lambda: other.kept() == [2])
    assert other.told("copied") == 1
    other.keep(7, one)
    other.serve_until(lambda: other.told("copy_failed") == 1)
    assert other.kept() == [2]


def test_steps_of_a_life_that_is_over_do_not_count_however_late_they_come(nodes: list[Node]) -> None:
    one, other = nodes
    keep_two(one, other)
    other.copies.begin((1, 1), 1)
    assert other.kept() == [1]
    one.save(3)
    os.kill(one.pid, signal.SIGSTOP)
    other.keep(3, one)
    other.copies.begin((1, 1), 1)
    os.kill(one.pid, signal.SIGCONT)
    one.save(4)
    other.keep(4, one)
    other.serve_until(lambda: 4 in other.kept())
    assert 3 not in other.kept()


def test_who_has_not_begun_the_round_gives_nothing_of_a_life_that_others_have_left(nodes: list[Node]) -> None:
    """The order to write the restored step comes with the start of the round; the partner's start may come later."""
    one, other = nodes
    for step in (1, 2):
        one.save(step)
    other.copies.begin((1, 1), 2)
    other.keep(2, one, number=1)
    one.serve_until(lambda: one.copies.port > 0)
    assert not select.select([other.copies.link.fileno()], [], [], 0.2)[0], "given too soon"
    arena.invalidate(one.arenas, 2)  # it missed a start, and learns so
    one.copies.begin((1, 1), -1)
    other.serve_until(lambda: other.told("copy_failed") == 1)
    assert other.kept() == []
    one.save(3)
    other.keep(3, one, number=1)
    other.serve_until(lambda: other.kept() == [3])


def test_a_new_replicator_knows_the_life_and_which_copies_count(nodes: list[Node]) -> None:
    one, other = nodes
    keep_two(one, other)
    os.kill(other.pid, signal.SIGSTOP)
    other.copies.begin((1, 3), 1)
    other.copies.link._process.kill()  # type: ignore[union-attr]
    other.serve_until(lambda: other.told("replicator_died") == 1 and other.copies.port > 0)
    assert other.kept() == [1]
    one.fetch(1, other)  # answered when Begin was carried out
    one.serve_until(lambda: one.brought == [1])
    assert [held.step for held in arena.scan(other.arenas / "copies")] == [1]


def test_nothing_happens_after_a_fetch_that_was_given_up(nodes: list[Node]) -> None:
    one, other = nodes
    other.save(5)
    os.kill(other.pid, signal.SIGSTOP)
    one.fetch(5, other, rank=1)
    one.copies.give_up()  # another round is prepared
    os.kill(other.pid, signal.SIGCONT)
    other.save(6)
    one.fetch(6, other, rank=1)
    one.serve_until(lambda: one.brought == [6])
    assert one.told("fetched") == 1


def test_a_snapshot_that_is_gone_fails_the_start_and_names_the_copy(nodes: list[Node]) -> None:
    one, other = nodes
    one.fetch(5, other)
    one.serve_until(lambda: bool(one.failed))
    assert one.failed == [(1, m.RestorePoint(Tier.MEMORY, 5), "there is no snapshot of step 5 of rank 0")]
    one.copies.when_brought(5, lambda: one.brought.append(0))  # nothing is on its way any more
    assert one.brought == [0]


def test_a_replicator_that_is_killed_is_started_again_and_gives_what_was_kept(nodes: list[Node]) -> None:
    one, other = nodes
    one.save(5)
    other.keep(5, one)
    other.serve_until(lambda: other.kept() == [5])
    former = other.copies.port
    other.copies.link._process.kill()  # type: ignore[union-attr]
    other.serve_until(lambda: other.told("replicator_died") == 1)
    assert other.copies.port == 0
    other.serve_until(lambda: other.copies.port not in (0, former))
    one.fetch(5, other)
    one.serve_until(lambda: one.brought == [5])


def test_the_transport_that_was_chosen_is_used_until_a_replicator_dies_of_it() -> None:
    need_fabric()
    with tempfile.TemporaryDirectory(prefix="resilio-test-", dir="/dev/shm") as name:
        one, other = (Node(Path(name), rank, transport="fabric") for rank in (0, 1))
        for node in (one, other):
            node.serve_until(lambda node=node: node.copies.port > 0)  # type: ignore[misc]
        for step in (1, 2):
            one.save(step)
            other.keep(step, one)
            other.serve_until(lambda step=step: step in other.kept())  # type: ignore[misc]
            if step == 1:
                other.copies.link._process.kill()  # type: ignore[union-attr]
                other.serve_until(lambda: other.told("replicator_died") == 1 and other.copies.port > 0)
        for node in (one, other):
            node.copies.close()
    assert [fields["by"] for kind, fields in other.recorded if kind == "copied"] == [read_by(), "tcp"]


def test_a_replicator_that_keeps_dying_is_told_and_not_started_again(nodes: list[Node]) -> None:
    one, _ = nodes
    for deaths in range(1, 7):
        one.copies.link._process.kill()  # type: ignore[union-attr]
        one.serve_until(lambda deaths=deaths: one.told("replicator_died") == deaths)  # type: ignore[misc]
    assert one.copies.link.fileno() is None
    assert len(one.said) == 1
    assert "died 6 times, there are no partner copies here any more" in one.said[0]


def test_a_replicator_killed_while_ranks_wait_for_it_fails_their_start(nodes: list[Node]) -> None:
    one, other = nodes
    other.save(5)
    os.kill(other.pid, signal.SIGSTOP)
    one.fetch(5, other)
    one.copies.link._process.kill()  # type: ignore[union-attr]
    one.serve_until(lambda: bool(one.failed))
    assert one.failed[0][2] == "the replicator process was killed"
    os.kill(other.pid, signal.SIGCONT)


def test_a_slow_giver_is_waited_for_and_a_replicator_that_is_stopped_is_not(nodes: list[Node]) -> None:
    one, other = nodes
    other.save(5)
    os.kill(other.pid, signal.SIGSTOP)
    one.fetch(5, other, rank=1)
    for _ in range(2):
        one.now += SILENT_S
        one.serve_until(lambda: one.copies._heard_at == one.now)  # it tells that it still asks
    assert one.failed == []
    os.kill(one.pid, signal.SIGSTOP)
    one.serve_until(lambda: bool(one.failed), passes_s=SILENT_S + 1.0)
    assert one.failed[0][2] == partner_copies.DIED
    one.serve_until(lambda: one.copies.port > 0)  # a new one serves
    os.kill(other.pid, signal.SIGCONT)
    assert one.brought == []


def test_without_a_replicator_ranks_are_not_started(nodes: list[Node]) -> None:
    one, other = nodes
    one.copies.link.end()
    assert not one.copies.fetch(*start(0, 5, other.endpoint))
    assert one.failed == [(1, m.RestorePoint(Tier.MEMORY, 5), partner_copies.DIED)]


def test_what_is_here_or_in_the_shared_directory_is_not_waited_for(nodes: list[Node]) -> None:
    one, other = nodes
    for local, order in ((1, start(0, 5, "")[1]), (0, start(1, 5, other.endpoint)[1])):
        assert one.copies.fetch(start(local, 5, "")[0], order)
        one.copies.when_brought(5, lambda: one.brought.append(5))
    assert one.brought == [5, 5]
