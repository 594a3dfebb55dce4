"""Steps by way of the node's own disk: what is written there, what its troubles cost. What stays there:
``test_local_retention``; what is read from there: ``test_local_restore``."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.ckpt.format import bulk_io
from resilio_hpc.ckpt.format.manifest import BLOCK_BYTES
from resilio_hpc.ckpt.saver import saver
from resilio_hpc.ckpt.saver.messages import (
    Local,
    LocalFailed,
    Persist,
    Persisted,
    SaverFailed,
)
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.backend import Store
from resilio_hpc.ckpt.store.shard_copy import copy_shard
from resilio_hpc.ckpt.tiers import local_disk
from resilio_hpc.ckpt.tiers.bounded_io import PATIENCE, Patience
from resilio_hpc.core.errors import CorruptCheckpoint
from resilio_hpc.native import direct_io
from tests.support.ckpt.local_node import WORLD, Node, flip, node_in
from tests.support.mounts import mounted
from tests.support.requirements import need_root


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with node_in(tmp_path) as made:
        yield made


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a small file system in memory."""
    with ExitStack() as mounts:
        yield lambda options: mounts.enter_context(mounted(tmp_path / "small", options))


# -- writing ---------------------------------------------------------------------------------------------------------


def test_the_same_bytes_are_on_the_nodes_disk_and_in_the_committed_step(node: Node) -> None:
    answer = node.persist(3)
    (local,) = node.progress
    assert isinstance(local, Local)
    assert isinstance(answer, Persisted)
    assert local.size_bytes == answer.record.size_bytes == node.copy(3).stat().st_size
    node.commit(answer)
    assert node.copy(3).read_bytes() == (checkpoint_index.step_directory(node.shared, 3) / "node-0.h5").read_bytes()
    assert node.is_committed(3)
    for path in (node.held, node.copy(3).parent):
        assert path.stat().st_mode & 0o777 == 0o700
    assert node.copy(3).stat().st_mode & 0o777 == 0o600


def test_arenas_may_be_overwritten_as_soon_as_the_saver_says_so(node: Node) -> None:
    def overwrite() -> None:
        for path in node.arenas.glob("rank*"):
            path.write_bytes(b"\xff" * path.stat().st_size)

    node.commit(node.persist(3, then=overwrite))
    assert node.is_committed(3)
    assert [held.step for held in arena.scan(node.arenas)] == []


def test_a_bad_arena_is_no_trouble_of_the_disk(node: Node) -> None:
    paths = node.take(3)
    arena.invalidate(node.arenas, 3)
    answer = saver.serve(
        Persist(3, 1, 0, WORLD, 0, paths, str(node.shared), str(node.disk), "n1"), node.progress.append
    )
    assert isinstance(answer, SaverFailed)
    assert node.progress == []


@pytest.mark.parametrize("by_way_of_the_disk", [True, False])
def test_a_limit_holds_for_the_shared_file_system_alone(
    by_way_of_the_disk: bool, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, found = node.take(3, 200_000), dict[str, set[float]]()
    write = direct_io.write

    def watched(fd: int, memory: memoryview, pieces: list[bulk_io.PageRun], *rest: Any) -> int:
        if pieces:
            directory = Path(f"/proc/self/fd/{fd}").readlink().relative_to(node.disk.parent).parts[0]
            found.setdefault(directory, set()).add(rest[3])
        return write(fd, memory, pieces, *rest)

    monkeypatch.setattr(bulk_io.direct_io, "write", watched)
    disk = str(node.disk) if by_way_of_the_disk else ""
    asked = Persist(3, 1, 0, WORLD, 0, paths, str(node.shared), disk, "n1", bytes_per_s=1e9)
    assert isinstance(saver.serve(asked, node.progress.append), Persisted)
    assert found == ({"disk": {0.0}} if by_way_of_the_disk else {}) | {"shared": {1e9}}


@pytest.mark.parametrize("size", [1, 511, 4096, 70_001, (3 * BLOCK_BYTES + 12_345) // 8])
def test_a_copy_is_the_same_whatever_the_sizes(size: int, node: Node) -> None:
    node.commit(node.persist(3, size=size))
    assert node.is_committed(3)


# -- troubles of the disk --------------------------------------------------------------------------------------------


def goes_straight(node: Node, step: int = 3) -> str:
    """The step is persisted all the same; what the user is told."""
    node.progress.clear()
    node.commit(node.persist(step))
    (failed,) = node.progress
    assert isinstance(failed, LocalFailed)
    assert "\n" not in failed.error
    assert f"until then steps go straight to {node.shared}" in failed.error
    assert node.is_committed(step)
    return failed.error


def test_a_directory_that_is_missing_is_not_made_since_a_mount_may_be_missing(node: Node) -> None:
    node.disk.rmdir()
    assert f"No such file or directory: {node.disk}: make that directory, on every node" in goes_straight(node)
    node.disk.mkdir()
    node.persist(4)
    assert isinstance(node.progress[-1], Local)


def test_a_directory_in_which_anybody_may_exchange_names_is_not_used(node: Node) -> None:
    node.disk.chmod(0o777)
    assert "any user may exchange what is in it" in goes_straight(node)
    assert list(node.disk.iterdir()) == []
    node.disk.chmod(0o1777)
    node.persist(4)
    assert isinstance(node.progress[-1], Local)


@pytest.mark.parametrize("what", ["a link", "open to others", "of somebody else", "a file"])
def test_what_others_prepared_is_neither_followed_nor_written_to(what: str, node: Node, tmp_path: Path) -> None:
    node.persist(1)
    held, elsewhere = node.held, tmp_path / "elsewhere"
    held.rename(elsewhere)
    if what == "a link":
        held.symlink_to(elsewhere)
    elif what == "a file":
        held.touch()
    else:
        held.mkdir(mode=0o700)
        if what == "open to others":
            held.chmod(0o755)
        else:
            need_root()
            os.chown(held, 12345, 12345)
    before = {path: path.stat().st_mtime_ns for path in elsewhere.rglob("*")}
    assert ("File exists" if what == "a file" else f"{held.name} is not yours alone") in goes_straight(node)
    assert {path: path.stat().st_mtime_ns for path in elsewhere.rglob("*")} == before
    assert what in ("a link", "a file") or list(held.iterdir()) == []


def test_links_inside_are_removed_and_not_followed(node: Node, tmp_path: Path) -> None:
    node.commit(node.persist(1))
    precious = tmp_path / "precious"
    (precious / "step").mkdir(parents=True)
    (node.held / "step-0000000002-e1-r0").symlink_to(precious)
    (node.held / "more").symlink_to(precious)
    (node.held / "file").touch()
    node.commit(node.persist(2))
    assert isinstance(node.progress[-1], Local)
    assert [path.name for path in precious.iterdir()] == ["step"]
    assert not node.copy(2).parent.is_symlink()
    assert node.steps == ["step-0000000001-e1-r0", "step-0000000002-e1-r0"]


def test_a_lock_that_is_a_link_is_not_followed(node: Node, tmp_path: Path) -> None:
    node.persist(1)
    (node.held / "held").unlink()
    (node.held / "held").symlink_to(tmp_path / "precious")
    goes_straight(node)
    assert not (tmp_path / "precious").exists()


def test_a_disk_with_too_little_room_is_told_and_used_again_when_it_has_some(
    node: Node, mount: Callable[[str], Path]
) -> None:
    node.disk = mount("size=4m")
    filler = node.disk / "filler"
    filler.write_bytes(b"x" * (3 << 20))
    told = goes_straight(node, 3)
    assert "no space left" in told
    assert "make room there for two steps of this node" in told
    filler.unlink()
    node.persist(4)
    assert isinstance(node.progress[-1], Local)


@pytest.mark.parametrize("free", [0, 4096, 8192, 20_480])
def test_room_that_vanishes_while_it_is_written_costs_nothing_either(
    free: int, node: Node, mount: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    node.disk = mount("size=4m")
    room = os.statvfs(node.disk)
    (node.disk / "filler").write_bytes(b"x" * (room.f_bavail * room.f_frsize - free))
    looked = Store.check_space
    monkeypatch.setattr(
        Store, "check_space", lambda self, at, *size: at.is_relative_to(node.disk) or looked(self, at, *size)
    )
    told = goes_straight(node)
    assert "o space left" in told
    assert [path for path in node.disk.rglob("*") if path.is_file() and path.name not in ("filler", "held")] == []


def test_a_read_only_disk_is_told(node: Node, mount: Callable[[str], Path]) -> None:
    node.disk = mount("ro")
    assert "Read-only file system" in goes_straight(node)


def test_a_disk_that_becomes_read_only_with_copies_on_it_is_told(node: Node, mount: Callable[[str], Path]) -> None:
    node.disk = mount("size=4m")
    node.commit(node.persist(1))
    subprocess.run(["mount", "-o", "remount,ro", str(node.disk)], check=True)
    assert "Read-only file system" in goes_straight(node, 2)


def test_another_process_that_writes_there_is_not_disturbed(node: Node) -> None:
    node.patience = Patience(lock_s=0.1)
    with local_disk.LocalDisk(node.disk, node.shared, "n1"):
        assert "another process writes there" in goes_straight(node)
    node.patience = PATIENCE
    node.persist(4)
    assert isinstance(node.progress[-1], Local)


# -- from there to the shared file system ----------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["damaged", "cut off", "gone", "a link"])
def test_a_copy_that_is_damaged_before_it_is_drained_fails_that_save_alone(what: str, node: Node) -> None:
    node.commit(node.persist(1))

    def harm() -> None:
        if what == "damaged":
            flip(node.copy(2), 9000)
        elif what == "cut off":
            os.truncate(node.copy(2), 5000)
        else:
            shutil.move(node.copy(2), node.arenas / "other")
            if what == "a link":
                node.copy(2).symlink_to(node.arenas / "other")

    answer = node.persist(2, then=harm)
    assert isinstance(answer, SaverFailed)
    assert "memory had been let go by then, so this save is lost" in answer.error
    assert checkpoint_index.committed_steps(node.shared) == [1]
    assert [path for path in node.shared.rglob("*.h5") if path.parent.name.startswith(".")] == []
    node.commit(node.persist(3))
    assert node.is_committed(3)
    assert node.steps == ["step-0000000001-e1-r0", "step-0000000003-e1-r0"]


@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_a_flipped_bit_of_any_byte_is_found_on_the_way(every: int, node: Node, tmp_path: Path) -> None:
    answer = node.persist(3, size=100)
    assert isinstance(answer, Persisted)
    target = tmp_path / "target"
    target.mkdir()
    for at in range(0, answer.record.size_bytes, every):
        flip(node.copy(3), at)
        with pytest.raises(CorruptCheckpoint):
            copy_shard(node.copy(3).parent, answer.record, target)
        assert list(target.iterdir()) == []
        flip(node.copy(3), at)
    copy_shard(node.copy(3).parent, answer.record, target)


def test_a_shared_file_system_that_is_full_fails_the_save_as_ever(node: Node, mount: Callable[[str], Path]) -> None:
    node.shared = mount("size=4m")
    node.commit(node.persist(1))
    answer = node.persist(2, size=300_000)
    assert isinstance(answer, SaverFailed)
    assert "no space left" in answer.error
    assert isinstance(node.progress[-1], Local)
    node.commit(node.persist(3))
    assert node.steps == ["step-0000000001-e1-r0", "step-0000000003-e1-r0"]
