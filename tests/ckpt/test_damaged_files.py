"""Files of a small checkpoint with flipped bits, cut off, exchanged: the right bits are restored, or older ones."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from resilio_hpc import ckpt
from resilio_hpc.ckpt.coordination.coordinator import use
from resilio_hpc.ckpt.coordination.local_coordinator import LocalCoordinator
from resilio_hpc.ckpt.format.manifest import BLOCK_BYTES
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.retention import Retention
from resilio_hpc.ckpt.store.verify import verify_step
from resilio_hpc.cli.ckpt.ckpt import main as resilio_ckpt
from resilio_hpc.core.errors import CorruptCheckpoint

STEPS = (10, 20)


def state_of(step: int, rank: int = 0) -> dict[str, object]:
    return {"x": np.arange(40) * step + rank, "y": [np.full(3, step, dtype=np.float16)], "step": step, "rank": rank}


def restored(directory: Path) -> int:
    """The step that a new Checkpointer restores, its content compared bit by bit."""
    return restored_by(ckpt.Checkpointer(directory))


def restored_by(checkpointer: ckpt.Checkpointer) -> int:
    """As ``restored``."""
    found = checkpointer.restore()
    assert found is not None
    step, state = found
    expected = state_of(step)
    assert state["x"].tobytes() == expected["x"].tobytes()  # type: ignore[attr-defined]
    assert state["y"][0].tobytes() == expected["y"][0].tobytes()  # type: ignore[index]
    assert (state["step"], state["rank"]) == (step, 0)
    return step


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Steps 10 and 20."""
    for name in ("RANK", "WORLD_SIZE", "RESILIO_AGENT_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    saver = ckpt.Checkpointer(tmp_path)
    for step in STEPS:
        saver.save(step, state_of(step)).wait(timeout_s=30)
    return tmp_path


def shard(directory: Path, step: int = 20, node: int = 0) -> Path:
    return checkpoint_index.step_directory(directory, step) / f"node-{node}.h5"


def flips(path: Path, bits: Callable[[int], range]) -> Iterator[int]:
    """Flip bit after bit of each byte in place; the number of the byte."""
    fd = os.open(path, os.O_RDWR)
    try:
        for at, byte in enumerate(path.read_bytes()):
            for bit in bits(at):
                os.pwrite(fd, bytes([byte ^ 1 << bit]), at)
                yield at
            os.pwrite(fd, bytes([byte]), at)
    finally:
        os.close(fd)


def one_bit(at: int) -> range:
    """Of every third byte."""
    return range(at % 8, at % 8 + (at % 3 == 0))


def every_bit(at: int) -> range:
    return range(8)


@pytest.mark.parametrize("bits", [one_bit, pytest.param(every_bit, marks=pytest.mark.slow)])
def test_a_flipped_bit_of_a_shard_file_is_found_by_verify_wherever_it_is(
    bits: Callable[[int], range], directory: Path
) -> None:
    manifest = checkpoint_index.manifest_of(directory, 20)
    assert verify_step(directory, manifest) == []
    for at in flips(shard(directory), bits):
        assert len(verify_step(directory, manifest)) == 1, f"byte {at}"
    assert verify_step(directory, manifest) == []


@pytest.mark.parametrize("bits", [one_bit, pytest.param(every_bit, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["node-0.h5", "manifest.json"])
def test_a_flipped_bit_changes_no_restored_one(
    name: str, bits: Callable[[int], range], directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = ckpt.Checkpointer(directory)
    found = {restored_by(saver) for _ in flips(checkpoint_index.step_directory(directory, 20) / name, bits)}
    assert found == ({10, 20} if name == "node-0.h5" else {10})  # HDF5's own metadata is nothing that a restore needs
    assert restored(directory) == 20


def test_a_flipped_bit_of_latest_is_found_by_verify_and_harms_nothing(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resilio_ckpt(["verify", str(directory)]) == 0
    for at in flips(directory / "latest", every_bit):
        assert restored(directory) == 20
        behind = (directory / "latest").read_text("latin-1") == "10\n"
        assert resilio_ckpt(["verify", str(directory)]) == (0 if behind else 1), at
        assert behind or "latest: " in capsys.readouterr().out
    (directory / "latest").write_text("10\n")  # as a kill just after the commit leaves it
    assert resilio_ckpt(["verify", str(directory)]) == 0
    (directory / "latest").unlink()
    assert resilio_ckpt(["verify", str(directory)]) == 0


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("name", ["node-0.h5", "manifest.json"])
def test_a_file_that_was_cut_off_or_grew_is_never_restored(name: str, share: float, directory: Path) -> None:
    path = checkpoint_index.step_directory(directory, 20) / name
    data = path.read_bytes()
    for size in {int(share * len(data)), int(share * len(data)) // 4096 * 4096, len(data) - 1} - {len(data)}:
        path.write_bytes(data[:size])
        assert restored(directory) == 10
        assert resilio_ckpt(["verify", "--json", str(directory)]) == 1
    path.write_bytes(data + b"\0")
    assert restored(directory) == 10


def test_when_all_files_are_cut_off_that_is_an_error_and_not_a_fresh_start(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.truncate(shard(directory, 20), 100)
    assert restored(directory) == 10
    assert "step 20 is damaged and not restored: node-0.h5: missing, or not as large" in capsys.readouterr().err
    os.truncate(shard(directory, 10), 100)
    with pytest.raises(CorruptCheckpoint, match=r"every step in .* is damaged; step 20: node-0.h5: missing"):
        ckpt.Checkpointer(directory).restore()


def exchange(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def test_files_of_two_steps_that_were_exchanged_are_not_taken_for_each_other(directory: Path) -> None:
    assert shard(directory, 10).stat().st_size == shard(directory, 20).stat().st_size
    exchange(shard(directory, 10), shard(directory, 20))
    for step in STEPS:
        with pytest.raises(CorruptCheckpoint):
            ckpt.Checkpointer(directory).restore(step=step)
    with pytest.raises(CorruptCheckpoint, match="no checkpoint could be restored"):
        ckpt.Checkpointer(directory).restore()
    assert resilio_ckpt(["verify", "--json", str(directory)]) == 1


def test_the_manifest_of_another_step_is_not_believed(directory: Path, tmp_path: Path) -> None:
    manifest = checkpoint_index.step_directory(directory, 20) / "manifest.json"
    shutil.copy(checkpoint_index.step_directory(directory, 10) / "manifest.json", manifest)
    assert restored(directory) == 10
    assert "of step 10" in checkpoint_index.damaged_steps(directory)[20]


def test_the_manifest_of_the_same_step_of_another_run_is_not_believed(directory: Path) -> None:
    other = directory / "other"
    ckpt.Checkpointer(other).save(20, state_of(21)).wait(timeout_s=30)
    shutil.copy(
        checkpoint_index.step_directory(other, 20) / "manifest.json", checkpoint_index.step_directory(directory, 20)
    )
    assert restored(directory) == 10


def test_files_of_two_ranks_that_were_exchanged_are_not_taken_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments = [{"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} for rank in range(2)]
    ranks = []
    for environment in environments:
        use(LocalCoordinator(tmp_path, environment, Retention()))
        ranks.append(ckpt.Checkpointer(tmp_path))
    use(None)
    handles = [saver.save(20, state_of(20, rank)) for rank, saver in enumerate(ranks)]
    for handle in handles:
        handle.wait(timeout_s=30)
    exchange(shard(tmp_path, 20, 0), shard(tmp_path, 20, 1))
    for saver in ranks:
        with pytest.raises(CorruptCheckpoint):
            saver.restore()
    assert resilio_ckpt(["verify", "--json", str(tmp_path)]) == 1


@pytest.mark.parametrize("size", [4096, BLOCK_BYTES])
def test_pages_and_blocks_that_changed_places_are_found(size: int, tmp_path: Path) -> None:
    import h5py

    values = np.arange(2 * BLOCK_BYTES // 8 + 1000)
    saver = ckpt.Checkpointer(tmp_path)
    saver.save(20, {"x": values}).wait(timeout_s=60)
    with h5py.File(shard(tmp_path)) as file:
        offset = file["rank0/x"].id.get_offset()
    fd = os.open(shard(tmp_path), os.O_RDWR)
    first, second = os.pread(fd, size, offset), os.pread(fd, size, offset + size)
    assert len(first) == len(second) == size
    os.pwrite(fd, second + first, offset)
    os.close(fd)
    with pytest.raises(CorruptCheckpoint, match="tensor x does not match its checksum"):
        saver.restore()
    assert len(verify_step(tmp_path, checkpoint_index.manifest_of(tmp_path, 20))) == 1
