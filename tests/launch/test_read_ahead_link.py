"""The agent has what its ranks will restore read ahead, and never waits for that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from resilio_hpc.ckpt import REPLICATED, Checkpointer
from resilio_hpc.core.tiers import Tier
from resilio_hpc.launch.agent.snapshots.read_ahead_link import ReadAheadLink
from resilio_hpc.launch.config.checkpoint_options import CheckpointOptions
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.local_round import LocalRound
from tests.support.mounts import hanging
from tests.support.waiting import until

NODES = ("n1", "n2")
SLOTS = 2


class Node:
    """What the link needs of an agent: the second node of two."""

    def __init__(self, path: Path) -> None:
        self.local_dir = path / "local"
        self.local_dir.mkdir()
        self.run = SimpleNamespace(path=path / "run")
        self.options = SimpleNamespace(max_nodes=2, checkpoints=CheckpointOptions())
        self.settings = SimpleNamespace(join=False, node="n2", expected=NODES, options=self.options)
        self.in_memory: tuple[m.Held, ...] = ()
        self.other_disks: dict[str, str] = {}
        disks: Any = SimpleNamespace(port=0, of_others=lambda start: self.other_disks)
        self.told: list[dict[str, Any]] = []
        self.link = ReadAheadLink(self, disks)  # type: ignore[arg-type]

    @property
    def checkpoints(self) -> Path:
        return self.run.path / "checkpoints"

    def record(self, kind: str, **fields: Any) -> None:
        assert kind == "read_ahead"
        self.told.append(fields)

    def hear(self, count: int) -> None:
        """Until so many readings have ended."""
        until(lambda: self.link.tick() or len(self.told) >= count, f"{count} readings", lambda: self.told)

    def start(self, step: int, source: str = "committed", fetches: tuple[m.MissingSnapshot, ...] = ()) -> None:
        members = [m.Member(node, number, node, SLOTS, SLOTS * number) for number, node in enumerate(NODES)]
        state = m.RoundState(1, 4, m.world_of(members), 0, 0, (step,))
        point = m.RestorePoint(Tier(source), step)
        begun = m.Start(1, state, "n1", 1234, point, fetches=fetches)
        self.link.begin(LocalRound("n2", state, members[1], point), begun)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    for step in (3, 5):
        Checkpointer(made.checkpoints, layout=REPLICATED).save(step, {"x": np.ones(1000)}).wait("committed", 60)
    yield made
    made.link.close()
    until(lambda: made.link.tick() or not made.link._killed, "the end of readers that were killed")


def test_the_newest_step_is_read_while_the_node_gets_ready_and_not_again_when_the_round_takes_it(node: Node) -> None:
    node.link.guess(SLOTS, node.in_memory)
    node.hear(1)
    assert (node.told[0]["step"], node.told[0]["size_bytes"]) == (5, 8000)
    node.start(5)
    assert node.link._reader is None


def test_another_step_than_the_newest_is_read_as_soon_as_the_round_is_decided(node: Node) -> None:
    node.link.guess(SLOTS, node.in_memory)
    node.hear(1)
    node.start(3)
    node.hear(2)
    assert node.told[1]["step"] == 3
    assert node.link.begun.read_text() == "3"


def test_a_later_round_reads_again_for_the_cache_may_have_gone(node: Node) -> None:
    node.link.guess(SLOTS, node.in_memory)
    node.hear(1)
    node.start(5)
    node.start(5)
    node.hear(2)


def test_what_is_in_memory_is_not_read(node: Node) -> None:
    node.in_memory = (m.Held(2, 5, 4),)
    node.link.guess(SLOTS, node.in_memory)
    node.start(5, "memory")
    assert node.link._reader is None


def test_of_a_step_in_memory_only_the_parts_that_memory_lacks_are_read(node: Node) -> None:
    node.start(5, "memory", (m.MissingSnapshot(3, ""),))
    assert node.link._ranks == (3,)
    node.hear(1)


@pytest.fixture
def hung(node: Node) -> Iterator[Node]:
    """Reading step 5 ahead hangs."""
    manifest = node.checkpoints / "step-0000000005" / "manifest.json"
    with hanging(manifest, manifest.read_bytes()):
        node.start(5)
        yield node


def test_a_file_system_that_hangs_is_not_waited_for(hung: Node) -> None:
    hung.start(3)
    hung.hear(1)
    assert hung.told[0]["step"] == 3


def test_a_reader_that_was_killed_is_told(hung: Node) -> None:
    assert hung.link._reader is not None
    hung.link._reader.kill()
    hung.hear(1)
    assert hung.told[0]["why_not"] == "its process died"


def test_a_spare_or_joiner_does_not_guess(node: Node) -> None:
    node.settings.options.max_nodes = 1
    node.link.guess(SLOTS, node.in_memory)
    node.settings.options.max_nodes, node.settings.join = 2, True
    node.link.guess(SLOTS, node.in_memory)
    assert node.link._reader is None
