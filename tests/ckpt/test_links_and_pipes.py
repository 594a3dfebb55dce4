"""What lies behind a link is read and never changed; what is no regular file is neither waited for nor believed."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.ckpt.store import checkpoint_index, writers
from resilio_hpc.ckpt.store.retention import Retention
from resilio_hpc.ckpt.store.staging import staging_directory
from resilio_hpc.cli.ckpt import ckpt
from resilio_hpc.core.errors import CheckpointError, CorruptCheckpoint, UsageError

FILES = ["manifest.json", "node-0.h5"]


def full(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((30_000,), float(step))}


@pytest.fixture
def checkpointer(disk_path: Path) -> Checkpointer:
    """With step 10."""
    made = Checkpointer(disk_path / "d", keep_last=2)
    made.save(10, full(10)).wait(timeout_s=60)
    return made


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def step_of(checkpointer: Checkpointer, step: int = 10) -> Path:
    return checkpoint_index.step_directory(checkpointer.directory, step)


def archived(checkpointer: Checkpointer, name: str = "") -> Path:
    """Step 10, or a file of it, moved elsewhere, a link in its place: the directory where it lies."""
    archive, there = checkpointer.directory.parent / "archive", step_of(checkpointer) / name
    if name:
        archive.mkdir()
    target = archive / name
    shutil.move(there, target)
    there.symlink_to(target)
    return archive


@pytest.mark.parametrize("name", ["", *FILES])
def test_a_step_or_file_behind_a_link_reads_well_and_outlives_its_link(name: str, checkpointer: Checkpointer) -> None:
    archive = archived(checkpointer, name)
    before = content(archive)
    found = checkpointer.restore(step=10)
    assert found is not None
    assert torch.equal(found[1]["w"], full(10)["w"])
    assert ckpt.main(["verify", str(checkpointer.directory)]) == 0
    assert ckpt.main(["copy", str(checkpointer.directory), str(archive.parent / "copy"), "10"]) == 0
    for step in (20, 30, 40):
        checkpointer.save(step, full(step)).wait(timeout_s=60)
    assert checkpointer.steps() == [30, 40]
    assert not os.path.lexists(step_of(checkpointer))
    assert content(archive) == before
    copied = Checkpointer(archive.parent / "copy").restore()
    assert copied is not None
    assert torch.equal(copied[1]["w"], full(10)["w"])


def save_again(checkpointer: Checkpointer) -> None:
    checkpointer.save(10, full(11)).wait(timeout_s=60)
    assert not step_of(checkpointer).is_symlink()


def prune(checkpointer: Checkpointer) -> None:
    checkpointer.save(20, full(20)).wait(timeout_s=60)
    assert checkpoint_index.prune(checkpointer.directory, Retention(1), time.time()) == [10]


def note(checkpointer: Checkpointer) -> None:
    checkpoint_index.note_damage(checkpointer.directory, 10, "a test")


def show(checkpointer: Checkpointer) -> None:
    with pytest.raises(UsageError, match="nothing is written behind links"):
        ckpt.main(["show", str(checkpointer.directory), "10", "--h5"])


@pytest.mark.parametrize("act", [save_again, prune, note, show])
def test_nothing_is_written_or_removed_behind_a_link(
    act: Callable[[Checkpointer], None], checkpointer: Checkpointer
) -> None:
    archive = archived(checkpointer)
    before = content(archive)
    act(checkpointer)
    assert content(archive) == before


def test_links_in_the_places_of_our_own_directories_lose_what_they_lead_to_nothing(checkpointer: Checkpointer) -> None:
    directory, other = checkpointer.directory, checkpointer.directory.parent / "other"
    other.mkdir()
    for name in ("node-0.h5", "notes.txt"):
        (other / name).write_bytes(b"mine" * 50_000)
    before = content(other)
    (directory / ".worn").symlink_to(other)
    staging = staging_directory(directory, 11, 0, 0)
    staging.symlink_to(other)
    writers.make_staging(staging, None)
    assert staging.is_dir() and not staging.is_symlink()
    (directory / "latest").unlink()
    (directory / "latest").symlink_to(other / "notes.txt")
    (directory / ".removed-step-0000000003-17-0123abcd").symlink_to(other)
    for step in (20, 30, 40):
        checkpointer.save(step, full(step)).wait(timeout_s=60)
    assert content(other) == before
    assert (directory / "latest").read_text() == "40\n"
    assert not os.path.lexists(directory / ".removed-step-0000000003-17-0123abcd")


def test_what_a_user_puts_beside_the_steps_stays(checkpointer: Checkpointer) -> None:
    directory = checkpointer.directory
    mine = [
        ".removed-by-me",
        ".replaced-old",
        ".removed-step-0000000001",
        ".staging-area",
        "step-0000000001.bak",
        "run",
    ]
    for name in mine:
        (directory / name).mkdir()
    files = [".latest.swp", ".latest.backup12", ".latest.old.tmp", "latest.txt", ".worn-notes"]
    for name in files:
        (directory / name).write_text("mine")
    for step in (20, 30, 40):
        checkpointer.save(step, full(step)).wait(timeout_s=60)
    checkpoint_index.prune(directory, Retention(1), time.time())
    assert {*mine, *files} <= {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("name", [*FILES, "damaged", "checkpoint.h5"])
def test_a_named_pipe_in_a_step_is_told_and_never_waited_for(
    name: str, checkpointer: Checkpointer, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpointer.save(20, full(20)).wait(timeout_s=60)
    path = step_of(checkpointer, 20) / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    found = Checkpointer(checkpointer.directory).restore()
    assert found is not None
    assert found[0] == (10 if name in FILES else 20)
    if name in FILES:
        with pytest.raises(CorruptCheckpoint, match="a named pipe, not a regular file"):
            checkpointer.restore(step=20)
    ckpt.main(["verify", str(checkpointer.directory)])
    assert name == "damaged" or "a named pipe" in capsys.readouterr().out
    checkpointer.save(30, full(30)).wait(timeout_s=60)
    assert checkpointer.steps()[-1] == 30


@pytest.mark.parametrize("name", ["latest", "epoch-fence"])
def test_a_named_pipe_beside_the_steps_is_never_waited_for(name: str, checkpointer: Checkpointer) -> None:
    (checkpointer.directory / name).unlink(missing_ok=True)
    os.mkfifo(checkpointer.directory / name)
    assert Checkpointer(checkpointer.directory).restore() is not None
    ckpt.main(["verify", str(checkpointer.directory)])
    checkpointer.save(20, full(20)).wait(timeout_s=60)
    assert (checkpointer.directory / name).read_text().startswith({"latest": "20\n", "epoch-fence": "0 crc32c"}[name])


@pytest.mark.parametrize("form", ["x.pt", "x.safetensors"])
def test_a_named_pipe_is_not_imported(form: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / form)
    with pytest.raises(CheckpointError, match="a named pipe, not a regular file"):
        ckpt.main(["import", str(tmp_path / form), str(tmp_path / "to"), "1"])
