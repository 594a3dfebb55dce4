"""What a directory of checkpoints tells is believed as far as it can be: its fence, latest, what is not seen."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

import pytest

from resilio_hpc import ckpt
from resilio_hpc.ckpt.store import checkpoint_index, fence
from resilio_hpc.ckpt.store.commit import commit_step
from resilio_hpc.cli.ckpt.ckpt import main as resilio_ckpt
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint
from tests.ckpt.test_catalogue import directory, restored
from tests.ckpt.test_commit import KEEP, stage

__all__ = ["directory"]


@pytest.mark.parametrize("damaged", [b"95 crc32c 12345678\n", b"9\xb5\n", b"", b"6\n", b"5 crc32c \n"])
def test_a_damaged_fence_is_neither_believed_nor_in_the_way(damaged: bytes, directory: Path) -> None:
    """Epoch 5 leads: the files of the run's directory say so, too."""
    for epoch in (1, 5):
        (directory.parent / f"epoch.{epoch}").touch()
    fence.raise_fence(directory, 5)
    good = (directory / fence.NAME).read_bytes()
    (directory / fence.NAME).write_bytes(damaged)
    assert fence.why_fence_is_wrong(directory)
    assert resilio_ckpt(["verify", str(directory)]) == 1
    found = checkpoint_index.manifest_of(directory, 20)
    stage(directory, 30, epoch=4)
    with pytest.raises(CheckpointError, match="epoch 5 has taken over"):
        commit_step(directory, 30, 4, 0, 1, "own", found.shards, KEEP)
    stage(directory, 30, epoch=5)
    commit_step(directory, 30, 5, 0, 1, "own", found.shards, KEEP)
    assert (directory / fence.NAME).read_bytes() == good
    assert resilio_ckpt(["verify", str(directory)]) == 0


def test_fences_of_earlier_versions_are_read_and_raised(directory: Path) -> None:
    (directory / fence.NAME).write_text("5\n")
    assert fence.why_fence_is_wrong(directory) == ""
    fence.check_fence(directory, 5, list)
    with pytest.raises(CheckpointError, match="epoch 5 has taken over"):
        fence.check_fence(directory, 4, list)
    fence.raise_fence(directory, 4)
    assert (directory / fence.NAME).read_text() == "5\n"
    fence.raise_fence(directory, 6)
    with pytest.raises(CheckpointError, match="epoch 6 has taken over"):
        fence.check_fence(directory, 5, list)


def test_a_damaged_fence_without_a_run_holds_back_what_the_committed_steps_do(directory: Path) -> None:
    found = checkpoint_index.manifest_of(directory, 20)
    stage(directory, 30, epoch=3)
    commit_step(directory, 30, 3, 0, 1, "own", found.shards, KEEP)
    (directory / fence.NAME).write_text("garbage")
    stage(directory, 40, epoch=2)
    with pytest.raises(CheckpointError, match="epoch 3 has taken over"):
        commit_step(directory, 40, 2, 0, 1, "own", found.shards, KEEP)


def test_latest_that_names_a_step_which_is_gone_is_told(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(directory / "step-0000000020")
    assert restored(directory) == 10
    said = f"step 20 was committed last in {directory}, and it is gone"
    assert capfd.readouterr().err == f"resilio: {said}: going on from step 10\n"
    shutil.rmtree(directory / "step-0000000010")
    with pytest.raises(CorruptCheckpoint, match=f"{said}; no other step is there .to begin anew, remove"):
        ckpt.Checkpointer(directory).restore()
    (directory / "latest").unlink()
    assert ckpt.Checkpointer(directory).restore() is None


def test_what_cannot_be_opened_for_want_of_descriptors_is_no_damage(directory: Path) -> None:
    """Nor is it an empty directory, in which a run would begin anew."""
    checkpoint = ckpt.Checkpointer(directory)
    checkpoint.restore()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 1, limit[1]))
    try:
        with pytest.raises(CheckpointError, match="Too many open files") as raised:
            checkpoint.restore()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        os.close(held[0])
    assert not isinstance(raised.value, CorruptCheckpoint)
    assert restored(directory) == 20
