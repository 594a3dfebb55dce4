"""What a node's snapshots become when its saver answers, fails or dies."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from resilio_hpc.ckpt.format.manifest import ShardRecord
from resilio_hpc.ckpt.saver import messages
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.ckpt.store.retention import Retention
from resilio_hpc.core import rank_link
from resilio_hpc.core.tiers import Stage
from resilio_hpc.launch.agent.snapshots.local_snapshots import REPLACED, SAVED_AGAIN_S, LocalSnapshots
from resilio_hpc.launch.agent.snapshots.saver_link import SaverRequest
from resilio_hpc.launch.config.checkpoint_options import CheckpointOptions
from resilio_hpc.launch.protocol import messages as m

MEMBER = m.Member("n1", 0, "n1", 1, 0)
RECORD = ShardRecord(0, "node-0.h5", 1, "own", ())
Said = messages.Progress | messages.Answer
DIED = messages.SaverFailed(5, "the saver process was killed")


class FakeSaver:
    """Takes requests, and gives the answers that a test puts in."""

    def __init__(self) -> None:
        self.requests: list[messages.Persist | messages.Commit] = []
        self.answers: list[tuple[SaverRequest, Said]] = []
        self.takes = True
        self.dead = False
        self.resumed = 0

    def send(self, message: messages.Persist | messages.Commit) -> bool:
        self.requests += [message] if self.takes else []
        return self.takes

    def receive(self) -> list[tuple[SaverRequest, Said]]:
        found, self.answers = self.answers, []
        return found

    def fileno(self) -> int | None:
        return None if self.dead else 3

    def resume(self) -> None:
        self.resumed += 1

    def tick(self) -> None:
        """There is no pause to end."""


class FakeCore:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        ranks = {0: SimpleNamespace(first_step_at=1.0)}
        self.local = SimpleNamespace(number=0, attached=[0], section="", restore=None, ranks=ranks)

    @property
    def saves(self) -> FakeCore:
        """Stands for the orders to save, too."""
        return self

    def persist_failed(self, round_number: int, step: int, error: str) -> None:
        self.told.append(("failed", round_number, step, error))

    def persisted(self, round_number: int, step: int, record: ShardRecord) -> None:
        self.told.append(("persisted", round_number, step))

    def commit_done(self, round_number: int, step: int, seconds: float) -> None:
        self.told.append(("committed", round_number, step))


class Node:
    """A node's snapshots in real arenas of one rank."""

    def __init__(self, path: Path, ranks_here: int = 1) -> None:
        self.arenas = path
        self.now = 1000.0
        self.core = FakeCore()
        self.saver = FakeSaver()
        self.recorded: list[str] = []
        self.fields: list[dict[str, Any]] = []
        self.stages: list[tuple[int, rank_link.AgentMessage]] = []
        self.said: list[str] = []
        checkpoints = CheckpointOptions(3, 100, None, 0.5, 0.25, local_checkpoints="/nvme")
        options = SimpleNamespace(checkpoints=checkpoints)
        context: Any = SimpleNamespace(
            arena_dir=path, local_dir=path, run=SimpleNamespace(path=path), record=self.record, options=options,
            name="n1", say=self.said.append,
        )  # fmt: skip
        ranks: Any = self.core
        self.snapshots = LocalSnapshots(
            context, ranks, lambda rank, message: self.stages.append((rank, message)), lambda: self.now
        )
        self.snapshots.saver = self.saver  # type: ignore[assignment]
        self._ranks_here = ranks_here
        self._pool = ThreadPoolExecutor(1)
        self.begin_round(0)

    def begin_round(self, number: int, restored: int = -1) -> None:
        """Other ranks, with the arenas of those before."""
        self.core.local.number = number
        self.core.local.restore = SimpleNamespace(step=restored) if restored >= 0 else None
        count = self._ranks_here
        self._pairs = [
            ArenaPair(self.arenas, Owner(rank, rank, count, count, number, "own", "a run"), self.arenas / "spill")
            for rank in range(count)
        ]

    def record(self, kind: str, **fields: Any) -> None:
        self.recorded.append(kind)
        self.fields.append(fields)

    def save(self, *steps: int) -> list[int]:
        """A rank saves; what is held then."""
        for step in steps:
            self.save_of(0, step)
        return [held.step for held in arena.scan(self.arenas)]

    def save_of(self, rank: int, step: int) -> None:
        """One rank saves."""
        Snapshot(self._pairs[rank], step, flatten({"x": np.full(10, step)}), self._pool).finish()

    def persist(self, step: int, round_number: int = 0) -> None:
        self.snapshots.persist(m.PersistStep(1, round_number, step), MEMBER, 1)

    def commit(self, step: int) -> None:
        self.snapshots.commit(m.CommitStep(1, 0, step, 1, (RECORD,)))

    def answer(self, *answers: tuple[SaverRequest, Said]) -> None:
        self.saver.answers += answers
        self.snapshots.serve()


@pytest.fixture
def node() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="resilio-test-", dir="/dev/shm") as name:
        yield Node(Path(name))


def test_a_commit_that_fails_leaves_alone_what_is_being_persisted(node: Node) -> None:
    node.save(1, 2)
    node.commit(1)
    node.persist(2)
    node.answer((SaverRequest(True, 0, 1), messages.SaverFailed(1, "no space left")))
    assert node.core.told == [("failed", 0, 1, "no space left")]
    assert node.save(3, 4) == [2, 4]
    node.answer((SaverRequest(False, 0, 2), messages.Persisted(2, 0, RECORD)))
    assert node.core.told[1:] == [("persisted", 0, 2)]
    assert node.save(5) == [4, 5]


def test_a_later_life_persists_the_same_step_while_the_former_one_is_at_it(node: Node) -> None:
    node.save(1)
    node.persist(1)
    node.persist(1, round_number=1)
    node.answer((SaverRequest(False, 0, 1), messages.Persisted(1, 0, RECORD)))
    assert node.save(2, 3) == [1, 3]
    node.answer((SaverRequest(False, 1, 1), messages.Persisted(1, 1, RECORD)))
    assert node.save(4) == [3, 4]


def test_a_saver_that_dies_fails_all_that_it_was_asked_to_commit_too(node: Node) -> None:
    node.save(5)
    node.persist(5)
    node.commit(4)
    node.saver.dead = True
    node.answer((SaverRequest(False, 0, 5), DIED), (SaverRequest(True, 0, 4), DIED))
    assert node.core.told == [("failed", 0, 5, DIED.error), ("failed", 0, 4, DIED.error)]
    assert node.recorded == ["saver_died"]
    assert node.save(6, 7) == [6, 7]


def test_the_saver_is_told_with_each_commit_which_steps_to_keep(node: Node) -> None:
    node.commit(1)
    (request,) = node.saver.requests
    assert isinstance(request, messages.Commit)
    assert request.retention == Retention(3, keep_every=100, keep_gb=0.5)
    node.snapshots.commit(m.CommitStep(1, 0, 9, 1, (RECORD,), verified=4))
    newest = node.saver.requests[-1]
    assert isinstance(newest, messages.Commit) and newest.retention.keep_step == 4


def test_what_the_saver_does_not_take_has_failed(node: Node) -> None:
    node.save(5)
    node.saver.takes = False
    node.persist(5)
    node.commit(4)
    node.persist(9)
    assert [told[:3] for told in node.core.told] == [("failed", 0, 5), ("failed", 0, 4), ("failed", 0, 9)]
    assert node.core.told[2][3] == "overwritten by a newer snapshot"
    assert node.save(6, 7) == [6, 7]


def test_the_saver_is_told_of_the_nodes_own_disk(node: Node) -> None:
    node.save(1)
    node.persist(1)
    (request,) = node.saver.requests
    assert isinstance(request, messages.Persist)
    assert (request.local, request.holder) == ("/nvme", "n1")


def test_arenas_are_let_go_once_the_file_is_on_the_nodes_own_disk_though_no_answer_has_come(node: Node) -> None:
    node.save(1, 2)
    node.persist(1)
    node.answer((SaverRequest(False, 0, 1), messages.Local(1, 4096, 0.25)))
    assert (node.recorded, node.fields) == (["local"], [{"step": 1, "size_bytes": 4096, "seconds": 0.25}])
    assert node.stages == [(0, rank_link.SaveProgress(1, Stage.LOCAL))]
    assert node.core.told == []
    assert node.save(3, 4) == [3, 4]
    node.persist(4)
    node.answer((SaverRequest(False, 0, 1), messages.Persisted(1, 0, RECORD)))
    assert node.core.told == [("persisted", 0, 1)]
    assert node.save(5, 6) == [4, 6]  # the pin of step 4 was not taken for that of step 1
    node.answer((SaverRequest(False, 0, 4), messages.Persisted(4, 0, RECORD)))
    assert node.save(7) == [6, 7]


def test_ranks_of_another_round_do_not_hear_of_it(node: Node) -> None:
    node.save(1)
    node.persist(1, round_number=3)
    node.answer((SaverRequest(False, 3, 1), messages.Local(1, 4096, 0.25)))
    assert node.stages == []


def test_a_saver_that_dies_after_that_has_failed_and_nothing_is_let_go_twice(node: Node) -> None:
    node.save(4, 5)
    node.persist(5)
    node.answer((SaverRequest(False, 0, 5), messages.Local(5, 4096, 0.25)))
    node.saver.dead = True
    node.answer((SaverRequest(False, 0, 5), DIED))
    assert node.core.told == [("failed", 0, 5, DIED.error)]
    assert node.recorded == ["local", "saver_died"]
    node.saver.dead = False
    node.persist(4)
    assert node.save(6, 7) == [4, 7]


def test_a_disk_that_does_not_take_it_is_told_once_and_the_arenas_are_kept_for_the_other_way(node: Node) -> None:
    node.save(1, 2)
    for step in (2, 2):
        node.persist(step)
        node.answer((SaverRequest(False, 0, step), messages.LocalFailed(step, "no space left: make room")))
        assert node.save(3, 4) == [2, 4]
        node.answer((SaverRequest(False, 0, step), messages.Persisted(step, 0, RECORD)))
    assert node.said == ["n1: no space left: make room"]
    assert node.recorded == ["local_failed"] * 2
    assert node.core.told == [("persisted", 0, 2)] * 2


def test_the_saver_is_told_where_to_write_and_how_fast(node: Node) -> None:
    node.save(1)
    node.persist(1)
    (request,) = node.saver.requests
    assert isinstance(request, messages.Persist)
    assert (request.local, request.holder, request.bytes_per_s) == ("/nvme", "n1", 0.25e9)


def test_room_that_runs_out_is_told_and_the_step_is_committed_all_the_same(node: Node) -> None:
    node.answer((SaverRequest(True, 0, 3), messages.Committed(3, 0.5, "/shared: 2.0 GB are free")))
    node.answer((SaverRequest(True, 0, 4), messages.Committed(4, 0.5)))
    assert node.core.told == [("committed", 0, 3), ("committed", 0, 4)]
    assert node.recorded == ["space_short"]
    assert node.said == [
        "room for checkpoints runs out: /shared: 2.0 GB are free (keep fewer steps, or make room)",
    ]


@pytest.fixture
def two_ranks() -> Iterator[Node]:
    """Both hold step 5, the last one; the saver has the order of another round to write it."""
    with tempfile.TemporaryDirectory(prefix="resilio-test-", dir="/dev/shm") as name:
        node = Node(Path(name), ranks_here=2)
        for rank in (0, 1):
            node.save_of(rank, 4)
            node.save_of(rank, 5)
        node.begin_round(1, restored=5)
        node.persist(5, round_number=1)
        yield node


NOT_WHOLE = messages.SaverFailed(5, "holds no whole snapshot")
OF_ROUND_1 = SaverRequest(False, 1, 5)


def test_a_step_that_restarted_ranks_save_again_is_written_from_their_new_snapshots(two_ranks: Node) -> None:
    node = two_ranks
    (old,) = node.saver.requests
    node.save_of(0, 5)
    node.answer((OF_ROUND_1, NOT_WHOLE))
    node.snapshots.tick()
    assert (node.core.told, len(node.saver.requests)) == ([], 1)  # the other rank is still at it
    node.save_of(1, 5)
    node.snapshots.tick()
    _, new = node.saver.requests
    assert isinstance(old, messages.Persist)
    assert isinstance(new, messages.Persist)
    assert set(new.arenas).isdisjoint(old.arenas)
    node.answer((OF_ROUND_1, messages.Persisted(5, 1, RECORD)))
    assert node.core.told == [("persisted", 1, 5)]


def test_also_where_the_order_comes_while_one_of_them_is_at_it(two_ranks: Node) -> None:
    node = two_ranks
    node.answer((OF_ROUND_1, messages.SaverFailed(5, "no space left")))
    assert node.core.told.pop() == ("failed", 1, 5, "no space left")
    node.save_of(0, 5)
    node.persist(5, round_number=1)
    assert (node.core.told, len(node.saver.requests)) == ([], 1)
    node.save_of(1, 5)
    node.snapshots.tick()
    assert len(node.saver.requests) == 2


@pytest.mark.parametrize("round_ends", [True, False])
def test_it_has_failed_where_the_other_rank_does_not(round_ends: bool, two_ranks: Node) -> None:
    node = two_ranks
    node.save_of(0, 5)
    node.answer((OF_ROUND_1, NOT_WHOLE))
    node.now += SAVED_AGAIN_S + 1
    if round_ends:
        node.begin_round(2, restored=5)
    node.snapshots.tick()
    assert node.core.told == ([] if round_ends else [("failed", 1, 5, NOT_WHOLE.error)])
    node.save_of(1, 5)
    node.snapshots.tick()
    assert len(node.saver.requests) == 1


def test_a_step_that_newer_ones_have_replaced_is_not_waited_for(node: Node) -> None:
    node.begin_round(1, restored=5)
    node.save(6, 7, 8)
    node.persist(6, round_number=1)
    assert node.core.told == [("failed", 1, 6, REPLACED)]


def test_the_saver_goes_on_for_a_last_checkpoint_though_no_step_was_done(node: Node) -> None:
    node.snapshots.tick()
    assert node.saver.resumed == 0
    node.core.local.section = rank_link.LAST_CHECKPOINT
    node.snapshots.tick()
    assert node.saver.resumed == 1
