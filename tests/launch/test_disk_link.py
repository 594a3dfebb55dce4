"""The agent's end of the process that gives from this node's disk: its port stays, and ranks are told of the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.tiers import local_disk
from resilio_hpc.ckpt.tiers.peer_disks import PeerDisks
from resilio_hpc.core.tiers import Tier
from resilio_hpc.launch.agent.snapshots.disk_link import MAX_DEATHS, DiskLink
from resilio_hpc.launch.config.checkpoint_options import CheckpointOptions
from resilio_hpc.launch.protocol import messages as m
from tests.support.waiting import until

SECRET = b"0123456789abcdef0123456789abcdef\n"


class Node:
    """What the link needs of a NodeContext."""

    def __init__(self, path: Path, name: str, with_disk: bool = True) -> None:
        self.local_dir = path / name
        self.local_dir.mkdir()
        self.run = SimpleNamespace(path=path / "run", secret=SECRET)
        self.disk = path / "disk"
        self.disk.mkdir(exist_ok=True)
        options = SimpleNamespace(checkpoints=CheckpointOptions(local_checkpoints=str(self.disk) if with_disk else ""))
        self.name, self.options = name, options
        self.settings = SimpleNamespace(address="127.0.0.1")
        self.told: list[str] = []
        self.said: list[str] = []
        self.link = DiskLink(self)  # type: ignore[arg-type]

    def record(self, kind: str, **fields: Any) -> None:
        self.told.append(kind)

    def say(self, line: str) -> None:
        self.said.append(line)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    """The first one has a step on its disk."""
    made = Node(tmp_path, "n1"), Node(tmp_path, "n2")
    checkpoint = Checkpointer(tmp_path / "run" / "checkpoints", local=made[0].disk)
    checkpoint.save(3, {"x": np.arange(1000)}).wait(timeout_s=60)
    yield made
    for node in made:
        node.link.close()


def start(ports: tuple[int, ...]) -> m.Start:
    members = [m.Member(f"n{number + 1}", number, "127.0.0.1", 1, number) for number in range(2)]
    state = m.RoundState(1, 0, m.world_of(members), 0, 0, (3,))
    return m.Start(1, state, "n1", 1234, m.RestorePoint(Tier.COMMITTED, 3), disk_ports=ports)


def first_bytes(node: Node) -> bytes:
    """Of the file of the other node, by way of what ranks of this one know."""
    (manifest,) = checkpoint_index.committed(node.run.path / "checkpoints")
    shard = msgspec.structs.replace(manifest.shards[0], node="n1")
    disks = PeerDisks(node.link.known, manifest)
    file = disks.file(shard)
    assert file is not None
    found = bytearray(8)
    file.fill(memoryview(found), 0)
    disks.close()
    return bytes(found)


def test_ranks_read_from_the_other_nodes_disk(nodes: tuple[Node, Node]) -> None:
    one, other = nodes
    one.link.start()
    other.link.begin(start((one.link.port, other.link.port)))
    assert first_bytes(other) == b"\x89HDF\r\n\x1a\n"
    one.link.begin(start((one.link.port, 0)))
    assert msgspec.json.decode(one.link.known.read_bytes())["disks"] == {}  # its own it reads itself
    other.link.begin(start(()))
    assert msgspec.json.decode(other.link.known.read_bytes())["disks"] == {}


def test_the_port_stays_when_the_process_dies_and_who_calls_meanwhile_waits(nodes: tuple[Node, Node]) -> None:
    one, other = nodes
    one.link.start()
    other.link.begin(start((one.link.port, other.link.port)))
    assert first_bytes(other)
    assert one.link._process is not None
    one.link._process.kill()
    until(lambda: one.link.tick() or one.told, "the death of the process")
    assert one.told == ["disk_giver_died"]
    assert first_bytes(other) == b"\x89HDF\r\n\x1a\n"
    assert one.said == []


def test_one_that_dies_again_and_again_is_told_once_and_given_up(nodes: tuple[Node, Node]) -> None:
    one, other = nodes
    one.link.start()
    for deaths in range(1, MAX_DEATHS + 2):
        assert one.link._process is not None
        one.link._process.kill()
        until(lambda: one.link.tick() or len(one.told) == deaths, "the death of the process")  # noqa: B023
    (line,) = one.said
    assert line.startswith("n1: other nodes cannot read checkpoints from its disk any more")
    other.link.begin(start((one.link.port, other.link.port)))
    with pytest.raises(ConnectionError, match="Connection refused"):  # at once: the port is closed
        first_bytes(other)
    for _ in range(3):
        one.link.tick()
    assert len(one.said) == 1


def test_without_local_checkpoints_nothing_listens(tmp_path: Path) -> None:
    node = Node(tmp_path, "n1", with_disk=False)
    node.link.start()
    node.link.tick()
    assert node.link.port == 0
    node.link.begin(start((5, 6)))
    assert msgspec.json.decode(node.link.known.read_bytes())["disks"] == {}
    node.link.close()


def test_it_ends_with_the_agent(nodes: tuple[Node, Node]) -> None:
    one, _ = nodes
    one.link.start()
    process = one.link._process
    assert process is not None
    one.link.close()
    assert process.poll() is not None
    assert local_disk.copies(
        one.disk, one.run.path / "checkpoints", checkpoint_index.committed(one.run.path / "checkpoints")[0]
    )
