"""torch.distributed.checkpoint by way of a node's own disk: written there first, read there where that is good."""

from __future__ import annotations

import secrets
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.ckpt.coordination.coordinator import LOCAL_VARIABLE, PEER_DISKS_VARIABLE
from resilio_hpc.ckpt.dcp.__init__ import ResilioReader, ResilioWriter
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.tiers.disk_messages import ServeDisk
from resilio_hpc.ckpt.tiers.disk_server import DiskGiver
from resilio_hpc.ckpt.tiers.peer_disks import write_known
from resilio_hpc.core.errors import CorruptCheckpoint
from tests.support.ckpt.local_node import flip, lose_tensors, worn_in


class Disk:
    """The shared directory, and the disk of this node."""

    def __init__(self, path: Path) -> None:
        self.shared, self.own = path / "shared", path / "disk"
        self.own.mkdir()

    def save(self, step: int, **options: Any) -> None:
        dcp.save(state_of(step), storage_writer=ResilioWriter(self.shared, step, **{"local": self.own, **options}))

    def load(self, **options: Any) -> dict[str, Any]:
        state = state_of(0)
        dcp.load(state, storage_reader=ResilioReader(self.shared, **{"local": self.own, **options}))
        return state

    def copies(self) -> list[Path]:
        return sorted(self.own.glob("resilio-steps-*/step-*/node-0.h5"))

    def lose_tensors(self) -> None:
        lose_tensors(self.shared, checkpoint_index.committed(self.shared)[-1])


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def state_of(step: int) -> dict[str, Any]:
    return {"x": torch.arange(300_000) * step, "y": torch.full((3,), float(step)), "step": step}


def is_right(state: dict[str, Any], step: int) -> bool:
    expected = state_of(step)
    return all(torch.equal(state[name], expected[name]) for name in ("x", "y")) and state["step"] == step


def test_a_step_is_read_from_the_nodes_own_disk(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.save(3)
    assert len(disk.copies()) == 1
    disk.lose_tensors()
    assert is_right(disk.load(), 3)
    monkeypatch.setenv(LOCAL_VARIABLE, str(disk.own))
    assert is_right(disk.load(local=None), 3)
    assert Checkpointer(disk.shared, local=disk.own).restore({"x": torch.zeros(300_000, dtype=torch.int64)})
    monkeypatch.delenv(LOCAL_VARIABLE)
    with pytest.raises(dcp.api.CheckpointException) as raised:
        disk.load(local=None)
    assert any(isinstance(error, CorruptCheckpoint) for error in errors_in(raised.value))


def errors_in(error: dcp.api.CheckpointException) -> list[BaseException]:
    return [failure[0] for failure in error.failures.values()]


def test_a_damaged_copy_costs_nothing_but_itself(disk: Disk, capfd: pytest.CaptureFixture[str]) -> None:
    disk.save(3)
    (copy,) = disk.copies()
    flip(copy, copy.stat().st_size // 3)
    assert is_right(disk.load(), 3)
    assert f"{copy} is bad" in capfd.readouterr().err
    assert disk.copies() == []


def test_a_disk_that_takes_nothing_is_told_and_costs_nothing(disk: Disk, capfd: pytest.CaptureFixture[str]) -> None:
    disk.own.rmdir()
    disk.save(3)
    assert f"No such file or directory: {disk.own}: make that directory" in capfd.readouterr().err
    assert is_right(disk.load(), 3)


def test_another_nodes_disk_is_read_where_the_agent_tells_of_it(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, key = tmp_path / "known", secrets.token_bytes(32)
    monkeypatch.setenv(PEER_DISKS_VARIABLE, str(known))
    write_known(known, key, {}, "n1")
    disk.save(3)
    assert checkpoint_index.committed(disk.shared)[-1].shards[0].node == "n1"
    disk.lose_tensors()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        giver = DiskGiver(listener, ServeDisk(key, str(disk.own), str(disk.shared)))
        threading.Thread(target=giver.run, daemon=True).start()
        write_known(known, key, {"n1": f"127.0.0.1:{listener.getsockname()[1]}"}, "n2")
        (tmp_path / "empty").mkdir()
        assert is_right(disk.load(local=tmp_path / "empty"), 3)
        listener.shutdown(socket.SHUT_RDWR)


def test_steps_are_written_over_there_and_here(disk: Disk) -> None:
    inodes = []
    for step in range(1, 6):
        disk.save(step, keep_last=1)
        assert is_right(disk.load(), step)
        (shard,) = disk.shared.glob("step-*/node-0.h5")
        inodes.append((shard.stat().st_ino, disk.copies()[-1].stat().st_ino))
    if worn_in(disk.shared):
        assert len({shared for shared, _ in inodes}) == 2
        assert len({own for _, own in inodes}) == 2
