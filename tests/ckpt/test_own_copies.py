"""What a node's own disk holds of committed steps, and of which ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.ckpt.format.own_copy import OwnCopy
from resilio_hpc.ckpt.tiers.disk_layout import prefix
from resilio_hpc.ckpt.tiers.own_copies import own_copies
from tests.support.waiting import PATIENCE_S


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[tuple[Path, Path, str]]:
    """The disk, the checkpoints, and who wrote them: two steps, both on the disk."""
    (tmp_path / "disk").mkdir()
    checkpoint = Checkpointer(tmp_path / "shared", local=tmp_path / "disk", local_keep=2)
    for step in (3, 5):
        checkpoint.save(step, {"x": np.ones(5000)}).wait("committed", PATIENCE_S)
    (mine,) = (tmp_path / "disk").iterdir()
    yield tmp_path / "disk", tmp_path / "shared", mine.name.removeprefix(prefix(tmp_path / "shared"))


def test_committed_steps_are_found_with_their_ranks_the_newest_first(saved: tuple[Path, Path, str]) -> None:
    assert own_copies(*saved) == [OwnCopy(5, 0, 1, 1), OwnCopy(3, 0, 1, 1)]
    argv = [sys.executable, "-m", "resilio_hpc.ckpt.tiers.own_copies", *map(str, saved)]
    said = subprocess.run(argv, capture_output=True, timeout=PATIENCE_S, check=True).stdout
    assert msgspec.json.decode(said, type=list[OwnCopy]) == own_copies(*saved)


def test_another_nodes_directory_on_that_disk_is_not_this_nodes(saved: tuple[Path, Path, str]) -> None:
    disk, checkpoints, holder = saved
    assert own_copies(disk, checkpoints, f"{holder}2") == []
    assert own_copies(disk, checkpoints / "others", holder) == []


def test_what_no_manifest_names_as_it_is_does_not_count(saved: tuple[Path, Path, str]) -> None:
    disk, *_ = saved
    (mine,) = disk.iterdir()
    newest, older = sorted(mine.glob("step-*"), reverse=True)
    (older / "node-0.h5").write_bytes(b"cut off")
    assert [copy.step for copy in own_copies(*saved)] == [5]
    (newest / "node-0.h5").unlink()
    (newest / "node-0.h5").symlink_to("/dev/zero")
    assert own_copies(*saved) == []
    (newest / "node-0.h5").unlink()
    newest.rename(mine / newest.name.replace("-e0-", "-e7-"))  # of another life of that step
    assert own_copies(*saved) == []
    (mine / "step-0000000009-e0-r0").mkdir(mode=0o700)  # on its way
    assert own_copies(*saved) == []


def test_a_disk_that_is_not_there_or_not_trusted_is_an_error_and_the_process_says_that_there_is_nothing(
    saved: tuple[Path, Path, str],
) -> None:
    disk, checkpoints, holder = saved
    with pytest.raises(FileNotFoundError):
        own_copies(disk / "no", checkpoints, holder)
    disk.chmod(0o777)
    with pytest.raises(PermissionError):
        own_copies(*saved)
    argv = [sys.executable, "-m", "resilio_hpc.ckpt.tiers.own_copies", *map(str, saved)]
    assert subprocess.run(argv, capture_output=True, timeout=PATIENCE_S, check=True).stdout == b"[]\n"
