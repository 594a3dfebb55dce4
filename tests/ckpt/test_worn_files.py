"""Files of removed steps that the next one writes over: never while others have them, and nothing of them stays."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.ckpt.store import checkpoint_index, posix
from resilio_hpc.core.durable import new_file
from tests.support.ckpt.local_node import worn_in


@pytest.fixture(autouse=True)
def on_a_disk_of_one_machine(disk_path: Path) -> None:
    if not worn_in(disk_path):
        pytest.skip("not on this file system")


def state(step: int, size: int = 300_000) -> dict[str, object]:
    """Of odd sizes: there are gaps between tensors, and the short one goes through the page cache."""
    few, many = np.full(5, step, dtype=np.int8), np.arange(77_777) * step
    return {"a": np.full(size + 3, step), "b": few, "c": many, "d": step}


def shard(directory: Path, step: int) -> Path:
    return checkpoint_index.step_directory(directory, step) / "node-0.h5"


def inode_of(directory: Path, step: int) -> int:
    return shard(directory, step).stat().st_ino


def test_a_step_takes_the_file_of_a_removed_one_and_is_byte_for_byte_what_a_new_one_is(disk_path: Path) -> None:
    worn, new = disk_path / "worn", disk_path / "new"
    checkpointer = Checkpointer(worn, keep_last=1)
    inodes = []
    for step, size in ((1, 300_000), (2, 300_000), (3, 200_000), (4, 400_000), (5, 400_000)):
        checkpointer.save(step, state(step, size)).wait(timeout_s=60)
        inodes.append(inode_of(worn, step))
        Checkpointer(new, keep_last=9).save(step, state(step, size)).wait(timeout_s=60)
        assert shard(worn, step).read_bytes() == shard(new, step).read_bytes()
        found = Checkpointer(worn).restore()
        assert found is not None
        assert found[1]["a"].tobytes() == np.full(size + 3, step).tobytes()
    assert inodes[2:] == [inodes[0], inodes[1], inodes[0]]
    assert len({inode_of(new, step) for step in range(1, 6)}) == 5


@pytest.mark.parametrize("how", ["open", "mapped", "linked", "link", "not ours"])
def test_what_somebody_else_has_is_not_written_over(how: str, disk_path: Path) -> None:
    directory = disk_path / "steps"
    checkpointer = Checkpointer(directory, keep_last=1)
    checkpointer.save(1, state(1)).wait(timeout_s=60)
    checkpointer.save(2, state(2)).wait(timeout_s=60)
    before = shard(directory, 2).read_bytes()
    kept = disk_path / "kept"
    reader = shard(directory, 2).open("rb")
    mapped = mmap.mmap(reader.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        if how != "open":
            reader.close()
        if how != "mapped":
            mapped.close()
        if how == "linked":
            os.link(shard(directory, 2), kept)
        elif how == "link":
            (directory / ".worn" / "node-0.h5").rename(kept)
            (directory / ".worn" / "node-0.h5").symlink_to(kept)
        elif how == "not ours":
            os.chown(directory / ".worn" / "node-0.h5", 4711, 4711)
        for step in (3, 4, 5):
            checkpointer.save(step, state(step)).wait(timeout_s=60)
        if how == "open":
            assert reader.read() == before
        elif how == "mapped":
            assert mapped[:] == before
        elif how == "linked":
            assert kept.read_bytes() == before
        elif how == "link":
            assert kept.stat().st_nlink == 1
            assert inode_of(directory, 5) != kept.stat().st_ino
        assert checkpoint_index.committed_steps(directory) == [5]
    finally:
        reader.close()
        mapped.close()


def test_a_reader_that_comes_while_it_is_written_over_finds_no_such_file(tmp_path: Path) -> None:
    worn = tmp_path / "worn"
    worn.write_bytes(b"old" * 1000)
    with new_file(tmp_path / "new", former=worn) as fd:
        assert not worn.exists()
        assert os.fstat(fd).st_size == 3000
    assert (tmp_path / "new").read_bytes() == b"old" * 1000  # whoever takes one has to write over all of it


def test_a_save_that_fails_leaves_nothing_of_it(tmp_path: Path) -> None:
    worn = tmp_path / "worn"
    worn.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), new_file(tmp_path / "new", former=worn):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_where_no_lease_can_be_had_removed_steps_go(disk_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on file systems of several machines."""
    directory = disk_path / "steps"
    for step in (1, 2, 3):
        Checkpointer(directory, keep_last=9).save(step, state(step)).wait(timeout_s=60)
    monkeypatch.setattr(posix, "is_ours_alone", lambda fd: False)
    checkpoint_index.remove_steps(directory, [1, 2], recycle=True)
    assert sorted(path.name for path in directory.iterdir()) == ["latest", "step-0000000003"]


@pytest.mark.parametrize("waits", [True, False])
def test_they_go_with_the_process_that_saves(waits: bool, disk_path: Path) -> None:
    program = (
        "import sys, numpy as np\n"
        "from resilio_hpc.ckpt import Checkpointer\n"
        f"checkpointer = Checkpointer({str(disk_path / 'steps')!r}, keep_last=1)\n"
        "for step in (1, 2, 3):\n"
        "    handle = checkpointer.save(step, {'x': np.full(2_000_000, step)})\n"
        f"if {waits}:\n"
        "    handle.wait(timeout_s=60)\n"
        "    import os\n"
        f"    assert os.path.isdir({str(disk_path / 'steps' / '.worn')!r})\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert sorted(path.name for path in (disk_path / "steps").iterdir()) == ["latest", "step-0000000003"]


def test_the_room_of_one_counts_as_free(disk_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worn = disk_path / "worn"
    with worn.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 50 << 20)

    class Full:
        f_bavail, f_frsize = 1 << 10, 1 << 12

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    store = posix.PosixStore()
    with pytest.raises(OSError, match="no space left"):
        store.check_space(disk_path, 40 << 20)
    store.check_space(disk_path, 40 << 20, worn)
    store.check_space(disk_path, 2 << 20, disk_path / "none")
