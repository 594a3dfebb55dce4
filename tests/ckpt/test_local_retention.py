"""What stays on the node's own disk, and for how long: its room is bounded, and nothing of others is touched."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.ckpt.saver.messages import Local
from resilio_hpc.ckpt.tiers import local_disk
from resilio_hpc.core.errors import UsageError
from tests.support.ckpt.local_node import Node, node_in
from tests.support.mounts import mounted
from tests.support.waiting import PATIENCE_S, until


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with node_in(tmp_path) as made:
        yield made


def test_the_step_committed_last_and_the_one_in_flight_stay(node: Node) -> None:
    for step in (1, 2, 3):
        node.commit(node.persist(step))
    assert node.steps == ["step-0000000002-e1-r0", "step-0000000003-e1-r0"]
    node.persist(4)  # never committed
    assert node.steps == ["step-0000000003-e1-r0", "step-0000000004-e1-r0"]
    node.persist(4, round_=1)
    assert node.steps == ["step-0000000003-e1-r0", "step-0000000004-e1-r1"]
    node.commit(node.persist(3, round_=2), round_=2)  # computed anew
    node.persist(5, round_=2)
    assert node.steps == ["step-0000000003-e1-r2", "step-0000000005-e1-r2"]


def test_as_many_committed_steps_stay_as_are_asked_for(node: Node) -> None:
    node.keep = 3
    for step in range(1, 6):
        node.commit(node.persist(step))
    node.persist(6)  # never committed
    node.persist(7)
    assert node.steps == [f"step-{step:010d}-e1-r0" for step in (3, 4, 5, 7)]
    node.keep = 1
    node.commit(node.persist(8))
    assert node.steps == [f"step-{step:010d}-e1-r0" for step in (5, 8)]


def test_a_checkpointer_without_a_launcher_keeps_as_many(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    checkpoint = Checkpointer(tmp_path / "remote", local=tmp_path / "disk", local_keep=2)
    for step in (1, 2, 3, 4):
        checkpoint.save(step, {"x": step}).wait(timeout_s=PATIENCE_S)
    (held,) = (tmp_path / "disk").iterdir()
    assert sorted(path.name[:15] for path in held.glob("step-*")) == [f"step-{step:010d}" for step in (2, 3, 4)]
    for wrong in (0, True, 1.5):
        with pytest.raises(UsageError, match="local_keep is a whole number of steps, at least 1"):
            Checkpointer(tmp_path / "remote", local_keep=wrong)  # type: ignore[arg-type]


def test_where_the_disk_is_full_older_steps_make_room(node: Node, tmp_path: Path) -> None:
    node.keep = 3
    with mounted(tmp_path / "small", "size=4m") as disk:
        node.disk = disk
        for step in range(1, 5):
            node.commit(node.persist(step, size=70_000))  # four of them do not fit
        assert [type(one) for one in node.progress] == [Local] * 4
        assert node.steps == ["step-0000000003-e1-r0", "step-0000000004-e1-r0"]
        assert node.is_committed(4)


def test_the_last_of_the_commits_stays_not_the_largest_number(node: Node) -> None:
    node.commit(node.persist(9))
    node.commit(node.persist(2, round_=1), 1)
    node.persist(3, round_=1)
    assert node.steps == ["step-0000000002-e1-r1", "step-0000000003-e1-r1"]


def test_what_a_killed_saver_left_goes_and_a_step_is_written_again(node: Node) -> None:
    node.persist(1)
    (node.copy(1).parent / ".node-0.h5.17.tmp").write_bytes(b"x" * 1000)
    node.commit(node.persist(1))
    assert [path.name for path in node.copy(1).parent.iterdir()] == ["node-0.h5"]


def test_nodes_of_one_machine_leave_each_other_alone(node: Node) -> None:
    node.commit(node.persist(1))
    first = node.held
    with local_disk.LocalDisk(node.disk, node.shared, "n/2") as other:
        other.new_step(2, 1, 0, 1)
    with local_disk.LocalDisk(node.disk, node.shared / "another run", "n1") as other:
        other.new_step(2, 1, 0, 1)
    assert [path.name for path in first.iterdir() if path.name != "held"] == ["step-0000000001-e1-r0"]
    assert len(list(node.disk.iterdir())) == 3


def leave(disk: Path, checkpoints: Path, age_s: float) -> Path:
    """What a run leaves behind that has ended so long ago."""
    before = set(disk.iterdir())
    with local_disk.LocalDisk(disk, checkpoints, "n1") as held:
        (held.new_step(1, 1, 0, 1) / "node-0.h5").touch()
    (found,) = set(disk.iterdir()) - before
    then = time.time() - age_s
    os.utime(found / "held", (then, then))
    os.utime(found, (then, then))
    return found


def test_leftovers_of_runs_that_are_over_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = local_disk.sweep
    monkeypatch.setattr(local_disk, "sweep", lambda disk: None)  # not yet
    disk = tmp_path / "disk"
    disk.mkdir()
    day = local_disk.ABANDONED_S
    for name in ("old", "young", "held", "unlocked", "unlocked young", "link", "foreign"):
        (tmp_path / name).mkdir()
    found = {name: leave(disk, tmp_path / name, day / 2) for name in ("young", "gone", "held", "unlocked young")}
    found |= {name: leave(disk, tmp_path / name, day * 2) for name in ("old", "unlocked", "foreign", "link")}
    for name in ("unlocked", "unlocked young"):
        mtime = found[name].stat().st_mtime
        (found[name] / "held").unlink()
        os.utime(found[name], (mtime, mtime))
    os.utime(found["held"] / "held", (0, 0))
    lock = os.open(found["held"] / "held", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    found["link"].rename(tmp_path / "target")
    found["link"].symlink_to(tmp_path / "target")
    found["foreign"].chmod(0o755)
    (disk / "resilio-arenas-0-1234").mkdir()
    (disk / "data").touch()
    sweep(disk)
    left = {name for name, path in found.items() if path.exists()}
    assert left == {"young", "held", "unlocked young", "link", "foreign"}
    assert (tmp_path / "target" / "held").exists()
    assert (disk / "data").exists()
    assert (disk / "resilio-arenas-0-1234").exists()
    os.close(lock)


def test_a_save_sweeps_what_others_left(node: Node, tmp_path: Path) -> None:
    old = leave(node.disk, tmp_path / "gone", 10)
    node.persist(1)
    until(lambda: not old.exists(), "the old copy is swept")
    assert isinstance(node.progress[-1], Local)
