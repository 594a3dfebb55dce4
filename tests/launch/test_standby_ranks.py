"""A node's standby processes: when they are started, which ranks they can stand in for, and what ends them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import pytest

from resilio_hpc.core import rank_link
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.rank_error import write_error
from resilio_hpc.events.event_text import words
from resilio_hpc.launch.config.reentry_options import ReentryOptions
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.forking import spawner_messages as sm
from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.standby_ranks import MOST_LOST, StandbyRanks
from resilio_hpc.train.run import _attach
from tests.support.waiting import PATIENCE_S

MEMBER = m.Member("n1", 0, "n1", 2, 0)


class Node:
    """Two ranks that train, and the processes that were ordered besides."""

    def __init__(self, folder: Path, count: int = 1, images: Literal["off", "on"] = "off") -> None:
        self.folder = folder
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.told: list[str] = []
        self.ordered: list[sm.RankCommand] = []
        context: Any = SimpleNamespace(
            name="n1", arena_dir=folder, local_dir=folder, record=self.record, tell=self.tell,
            options=SimpleNamespace(reentry=ReentryOptions(spare_ranks=count, process_images=images)),
        )  # fmt: skip
        spawner: Any = SimpleNamespace(spawn=self.ordered.append)
        self.parts = StandbyRanks(context, spawner)
        self.local = LocalRound("n1", m.RoundState(1, 3, m.world_of((MEMBER,)), 0, 0, ()), MEMBER, None)
        self.parts.begin([self.command(rank) for rank in range(2)])

    def record(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def tell(self, kind: str, **fields: Any) -> None:
        self.record(kind, **fields)
        self.told.append(words(kind, {"node": "n1", **fields}))

    def command(self, rank: int, *arguments: str, **variables: str) -> sm.RankCommand:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "RESILIO_LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        own |= {"TORCHELASTIC_ERROR_FILE": str(self.folder / f"{rank}.json"), "RESILIO_RESTORE": "memory:7"}
        log = str(self.folder / f"{rank}.log")
        return sm.RankCommand(rank, ("train.py", *arguments), "script", own | variables, "/", log, log)

    def train(self) -> None:
        for rank in range(2):
            self.local.said(rank, rank_link.Attach(rank, rank, 3, 10 + rank), 1.0)
            self.local.said(rank, rank_link.CanReenter(), 1.0)
            self.local.said(rank, rank_link.StepDone(1, 1.0), 1.0)
        self.parts.tick(self.local)

    def start(self, pid: int = 100) -> int:
        """Start the one that was ordered last. Return its number."""
        number = self.ordered[-1].local_rank
        assert self.parts.take_event(sm.Started(number, pid, 1.0, "fork", "")) is None
        return number

    def ready(self, pid: int = 100) -> int:
        number = self.start(pid)
        self.parts.heard(number, rank_link.CanReenter())
        return number

    def dumped(self, pid: int) -> sm.RankImage:
        """Start a process, and have it as an image."""
        one = self.parts._waiting[self.start(pid)]
        one.is_ready, one.pid = True, 0
        one.image = sm.RankImage("criu", str(self.folder / str(pid)), pid, 1, one.command, 15.0)
        Path(one.image.directory).mkdir()
        return one.image

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def exited(number: int, pid: int, code: int | None = 1, signal: int | None = None) -> sm.Exited:
    return sm.Exited(number, pid, code, signal, 2.0, "fork")


def test_it_is_started_when_all_ranks_train_in_a_function_that_can_be_entered_again(node: Node) -> None:
    node.parts.tick(node.local)
    node.parts.tick(None)
    assert node.ordered == []
    node.train()
    node.parts.tick(node.local)
    (command,) = node.ordered
    assert command.local_rank < 0
    assert (command.env["RANK"], command.env["RESILIO_RESTORE"]) == ("standby", "")
    assert Path(command.stdout_path).name == "standby1.log"


def test_none_is_started_where_ranks_have_arguments_of_their_own_or_end(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.parts.begin([node.command(0, "--shard=0"), node.command(1, "--shard=1")])
    node.train()
    assert node.ordered == []
    node = Node(tmp_path)
    node.local.said(0, rank_link.Finished(9), 1.0)
    node.train()
    assert node.ordered == []


def test_it_takes_any_rank_of_the_node_once_it_waits(node: Node) -> None:
    node.train()
    number = node.start()
    assert node.parts.take(node.command(1)) == 0, "it may never come to wait"
    node.parts.heard(number, rank_link.CanReenter())
    assert node.parts.take(node.command(1, "--other")) == 0
    assert node.parts.take(node.command(1, OMP_NUM_THREADS="4")) == 0
    assert node.parts.take(node.command(1)) == 100
    assert node.parts.take(node.command(0)) == 0, "it has a rank now"
    event = node.parts.take_event(exited(number, 100))
    assert isinstance(event, sm.Exited) and event.local_rank == 1, "its end is that of the rank"
    assert node.kinds() == ["standby_ready", "standby_used"]


def test_another_one_follows_the_one_that_was_taken(node: Node) -> None:
    node.train()
    node.ready()
    node.parts.take(node.command(0))
    node.parts.tick(node.local)
    assert [command.local_rank for command in node.ordered] == [-1, -2]


def test_one_that_ends_before_it_waits_is_the_last_and_says_why(node: Node, tmp_path: Path) -> None:
    node.train()
    number = node.start()
    write_error(Path(node.ordered[0].env["TORCHELASTIC_ERROR_FILE"]), ValueError("invalid literal: 'standby'"))
    assert node.parts.take_event(exited(number, 100)) is None
    node.parts.tick(node.local)
    assert len(node.ordered) == 1
    assert "ValueError: invalid literal: 'standby'; there are no more of them" in node.told[0]
    assert str(tmp_path / "standby1.log") in node.told[0]


def test_one_that_cannot_be_started_is_the_last(node: Node) -> None:
    node.train()
    assert node.parts.take_event(sm.SpawnFailed(-1, "cannot fork")) is None
    node.parts.tick(node.local)
    assert len(node.ordered) == 1 and "cannot fork" in node.told[0]


def test_one_that_is_killed_while_it_waits_is_replaced_but_not_for_ever(node: Node) -> None:
    node.train()
    for count in range(1, MOST_LOST + 1):
        number = node.ready(100 + count)
        assert len(node.told) == 0
        assert node.parts.take_event(exited(number, 100 + count, None, 9)) is None
        node.parts.tick(node.local)
        assert len(node.ordered) == min(count + 1, MOST_LOST)
    assert len(node.told) == 1 and "SIGKILL" in node.told[0]


def test_it_lives_on_when_ranks_are_ended_and_one_that_had_just_begun_is_no_loss(tmp_path: Path) -> None:
    node = Node(tmp_path, count=2)
    node.train()
    first, second = (command.local_rank for command in node.ordered)
    node.parts.take_event(sm.Started(first, 100, 1.0, "fork", ""))
    assert node.parts.keep() == (100,)
    node.parts.take_event(sm.Started(second, 101, 1.0, "fork", ""))
    node.parts.take_event(exited(second, 101, None, 9))
    node.parts.tick(node.local)
    assert len(node.ordered) == 3 and node.told == []
    assert node.parts.keep() == (100,)


def test_all_are_gone_with_the_spawner(node: Node) -> None:
    node.train()
    node.ready()
    event = sm.SpawnerDied(1, None, (), 2.0)
    assert node.parts.take_event(event) is event
    assert node.parts.take(node.command(0)) == 0
    node.parts.tick(node.local)
    assert len(node.ordered) == 2


def test_at_the_end_of_the_run_they_are_killed(node: Node) -> None:
    node.train()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    number = node.ready(process.pid)
    node.parts.end()
    assert process.wait(PATIENCE_S) == -9
    assert node.parts.take_event(exited(number, process.pid, None, 9)) is None
    node.parts.tick(node.local)
    assert len(node.ordered) == 1 and "standby_lost" not in node.kinds()


def test_its_cpus_become_those_of_the_rank(node: Node) -> None:
    cpu = min(os.sched_getaffinity(0))
    node.train()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    try:
        node.ready(process.pid)
        assert node.parts.take(msgspec.structs.replace(node.command(1), cpus=(cpu,))) == process.pid
        assert os.sched_getaffinity(process.pid) == {cpu}
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def test_a_script_hears_that_it_has_no_rank_yet() -> None:
    class Link:
        place = None

        def subscribe(self, *_: object) -> None: ...
        def on_close(self, *_: object) -> None: ...
        def on_enter(self, enter: Any) -> None:
            self.enter = enter

        def send(self, _: object) -> None: ...

    link: Any = Link()
    standby = {rank_link.STANDBY_VARIABLE: "-1", "RANK": "standby", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    run = _attach(standby, lambda _: link)
    assert run.world_size == 2
    for name in ("rank", "local_rank", "round"):
        with pytest.raises(UsageError, match=f"run.{name}: a process of --spare-ranks has no rank"):
            getattr(run, name)
    link.enter({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RESILIO_ROUND": "4"})
    assert (run.rank, run.local_rank, run.round) == (1, 1, 4)


def test_an_image_goes_with_the_command_of_the_rank_whose_place_it_takes(node: Node) -> None:
    node.train()
    image = node.dumped(100)
    assert node.parts.take(node.command(1)) == 0, "no process waits"
    assert node.parts.with_image(node.command(1, "another", "argument")).image is None
    assert node.parts.with_image(node.command(1)).image == image
    assert node.parts.with_image(node.command(0)).image is None, "it was the only one"
    started = sm.Started(1, 100, 1.0, "image", "")
    assert node.parts.take_event(started) == started
    kind, fields = node.events[-1]
    assert (kind, fields["pid"], fields["rank"], "restored_s" in fields) == ("standby_used", 100, 1, True)
    assert not Path(image.directory).exists()


def test_after_one_that_was_not_restored_no_other_image_is_used(tmp_path: Path) -> None:
    node = Node(tmp_path, 1, "on")
    node.train()
    first = node.dumped(100)
    node.parts.with_image(node.command(1))
    node.parts.tick(node.local)
    second = node.dumped(200)
    assert node.parts.take_event(sm.ImageFailed(1, 100, "its files have changed", 0.1)) is None
    assert "could not be restored: its files have changed; from here on they wait in memory" in node.told[-1]
    forked = sm.Started(1, 300, 1.0, "fork", "")
    assert node.parts.take_event(forked) == forked
    assert node.parts.with_image(node.command(0)).image is None
    assert "standby_used" not in node.kinds()
    assert not Path(first.directory).exists() and not Path(second.directory).exists()
