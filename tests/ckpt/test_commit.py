"""A commit makes a step appear whole, once, and by those alone who may."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from resilio_hpc.ckpt.store import checkpoint_index, fence
from resilio_hpc.ckpt.store.backend import Store
from resilio_hpc.ckpt.store.commit import commit_step
from resilio_hpc.ckpt.store.retention import Retention
from resilio_hpc.ckpt.store.staging import staging_directory
from resilio_hpc.core.errors import CheckpointError
from tests.ckpt.test_catalogue import directory, restored, shard

__all__ = ["directory"]
KEEP = Retention(3)


def test_a_commit_looks_at_every_step_once_and_takes_sizes_from_the_manifests(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Path] = []
    size_of = Store.size_of

    def counted(store: Store, path: Path, follow: bool = True) -> int:
        looked.append(path)
        return size_of(store, path, follow)

    monkeypatch.setattr(Store, "size_of", counted)
    found = checkpoint_index.manifest_of(directory, 20)
    stage(directory, 30, epoch=0)
    room = 1.5 * found.size_bytes / 1e9
    commit_step(directory, 30, 0, 0, 1, "own", found.shards, Retention(9, keep_gb=room))
    assert [path.parent.name[-2:] for path in looked] == ["r0", "10", "20"]
    assert checkpoint_index.committed_steps(directory) == [30]


def test_an_epoch_that_was_fenced_off_cannot_commit(directory: Path) -> None:
    found = checkpoint_index.manifest_of(directory, 20)
    fence.raise_fence(directory, 5)
    fence.raise_fence(directory, 3)
    stage(directory, 30, epoch=4)
    with pytest.raises(CheckpointError, match="epoch 5 has taken over"):
        commit_step(directory, 30, 4, 0, 1, "own", found.shards, KEEP)
    stage(directory, 30, epoch=5)
    commit_step(directory, 30, 5, 0, 1, "own", found.shards, KEEP)
    assert checkpoint_index.committed_steps(directory) == [10, 20, 30]


def stage(directory: Path, step: int, epoch: int, round_: int = 0) -> Path:
    """Shards of ``step`` on their way (those of step 20)."""
    staging = staging_directory(directory, step, epoch, round_)
    staging.mkdir()
    shutil.copy(shard(directory), staging)
    return staging


def test_a_step_of_a_later_epoch_is_not_replaced(directory: Path) -> None:
    found = checkpoint_index.manifest_of(directory, 20)
    stage(directory, 30, epoch=7)
    commit_step(directory, 30, 7, 0, 1, "own", found.shards, KEEP)
    stage(directory, 30, epoch=6)
    with pytest.raises(CheckpointError, match="epoch 7, later than our 6"):
        commit_step(directory, 30, 6, 0, 1, "own", found.shards, KEEP)


def test_a_step_saved_again_replaces_the_former_whole(directory: Path) -> None:
    found = checkpoint_index.manifest_of(directory, 20)
    stage(directory, 20, epoch=0, round_=3)
    commit_step(directory, 20, 0, 3, 1, "own", found.shards, KEEP)
    commit_step(directory, 20, 0, 3, 1, "own", found.shards, KEEP)  # asked twice: nothing happens
    assert checkpoint_index.manifest_of(directory, 20).round == 3
    assert restored(directory) == 20


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda staging: (staging / "node-0.h5").unlink(), "missing"),
        (lambda staging: (staging / "node-0.h5").write_bytes(b"short"), "another size"),
        (shutil.rmtree, "missing"),
    ],
)
def test_incomplete_shards_are_not_committed(change: Callable[[Path], None], why: str, directory: Path) -> None:
    found = checkpoint_index.manifest_of(directory, 20)
    change(stage(directory, 30, epoch=0))
    with pytest.raises(CheckpointError, match=why):
        commit_step(directory, 30, 0, 0, 1, "own", found.shards, KEEP)
    assert checkpoint_index.committed_steps(directory) == [10, 20]


def test_a_commit_that_lacks_a_rank_is_refused(directory: Path) -> None:
    found = checkpoint_index.manifest_of(directory, 20)
    stage(directory, 30, epoch=0)
    with pytest.raises(CheckpointError, match="of a world of 2"):
        commit_step(directory, 30, 0, 0, 2, "own", found.shards, KEEP)


def test_a_commit_sweeps_what_earlier_lives_left_and_nothing_newer(directory: Path) -> None:
    found = checkpoint_index.manifest_of(directory, 20)
    old, newer = stage(directory, 15, epoch=0, round_=0), stage(directory, 40, epoch=0, round_=2)
    stage(directory, 30, epoch=0, round_=1)
    commit_step(directory, 30, 0, 1, 1, "own", found.shards, KEEP)
    assert not old.exists()
    assert newer.exists()
