"""Restores from the node's own disk: used where it is what was committed, and never believed otherwise."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resilio_hpc.ckpt import REPLICATED, Checkpointer, Slab
from resilio_hpc.ckpt.coordination.coordinator import use
from resilio_hpc.ckpt.coordination.local_coordinator import LocalCoordinator
from resilio_hpc.ckpt.format import bulk_io
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.retention import Retention
from resilio_hpc.core.errors import CorruptCheckpoint
from resilio_hpc.core.tiers import Tier
from tests.support.ckpt.local_node import flip


class Told(LocalCoordinator):
    """Keeps from where each restore was."""

    def __init__(self, directory: Path, local: Path | None, rank: int = 0, world: int = 1) -> None:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        super().__init__(directory, {name: str(number) for name, number in numbers.items()}, Retention(), local=local)
        self.sources: list[str] = []

    def restored(self, step: int, source: str, seconds: float) -> None:
        self.sources.append(source)


class Place:
    """A checkpoint directory and the disk of a node."""

    def __init__(self, path: Path) -> None:
        self.remote, self.disk = path / "remote", path / "disk"
        self.disk.mkdir()

    def process(
        self, rank: int = 0, world: int = 1, with_disk: bool = True, **options: Any
    ) -> tuple[Checkpointer, Told]:
        told = Told(self.remote, self.disk if with_disk else None, rank, world)
        use(told)
        made = Checkpointer(self.remote, **options)
        use(None)
        return made, told

    def save(self, step: int, *states: Any, with_disk: bool = True, **options: Any) -> None:
        """All processes save."""
        world = len(states)
        processes = [self.process(rank, world, with_disk, **options)[0] for rank in range(world)]
        handles = [made.save(step, state) for made, state in zip(processes, states, strict=True)]
        for handle in handles:
            handle.wait(timeout_s=60)

    def copies(self) -> list[Path]:
        return sorted(self.disk.glob("resilio-steps-*/step-*/node-*.h5"))

    def committed(self, step: int, node: int = 0) -> Path:
        return checkpoint_index.step_directory(self.remote, step) / f"node-{node}.h5"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    yield Place(tmp_path)
    use(None)


def state_of(step: int, rank: int = 0, size: int = 100) -> dict[str, Any]:
    return {"x": np.arange(size) * step + rank, "few": np.full(3, step, dtype=np.int8), "step": step, "rank": rank}


def lose(path: Path) -> None:
    """Of a committed file only the size is left: whoever needs it fails."""
    size = path.stat().st_size
    path.write_bytes(b"")
    os.truncate(path, size)


def restored(place: Place, rank: int = 0, world: int = 1, **options: Any) -> tuple[int, str]:
    """The step, and where it came from; its content is compared."""
    process, told = place.process(rank, world, **options)
    found = process.restore()
    assert found is not None
    step, state = found
    expected = state_of(step, rank, len(state["x"]))
    assert state["x"].tobytes() == expected["x"].tobytes()
    assert state["few"].tobytes() == expected["few"].tobytes()
    assert (state["step"], state["rank"]) == (step, rank)
    return step, told.sources[-1]


def test_a_committed_step_is_read_from_the_nodes_own_disk(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    place.save(3, state_of(3))
    lose(place.committed(3))
    assert restored(place) == (3, "local")
    assert capfd.readouterr().err == ""


def test_without_a_disk_or_on_another_node_it_is_read_from_the_shared_one(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    place.save(3, state_of(3))
    assert restored(place, with_disk=False) == (3, "committed")
    shutil.rmtree(place.disk)
    assert restored(place) == (3, "committed")
    assert capfd.readouterr().err == ""


def test_the_stage_local_comes_before_committed(place: Place) -> None:
    process, told = place.process()
    stages: list[str] = []
    told.on_stage(lambda step, stage, error: stages.append(stage))
    process.save(3, state_of(3)).wait(timeout_s=60)
    assert stages == ["local", "committed"]


def test_a_disk_that_takes_nothing_is_told_once_and_costs_nothing(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    place.disk.rmdir()
    process, _ = place.process()
    for step in (1, 2):
        process.save(step, state_of(step)).wait(timeout_s=60)
    place.disk.mkdir()
    process.save(3, state_of(3)).wait(timeout_s=60)
    (line,) = capfd.readouterr().err.splitlines()
    assert f"No such file or directory: {place.disk}: make that directory" in line
    assert restored(place) == (3, "local")


def test_a_flipped_bit_of_a_copy_changes_no_restored_one_and_costs_no_step(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    place.save(2, state_of(2))
    place.save(3, state_of(3))
    (_, copy) = place.copies()
    good = copy.read_bytes()
    seen = set()
    for at in range(0, len(good), 31):
        flip(copy, at)
        step, source = restored(place)
        assert step == 3
        assert copy.exists() == (source == "local")
        said = capfd.readouterr().err
        if source == Tier.COMMITTED:
            assert said.count("\n") == 1
            assert f"{copy} is bad, {place.committed(3).parent} is read instead: " in said
        else:
            assert said == ""  # HDF5's own metadata, which no restore reads
        seen.add(source)
        copy.write_bytes(good)
    assert seen == {"local", "committed"}


@pytest.mark.parametrize("what", ["cut off", "longer", "a link", "a directory"])
def test_a_copy_that_is_no_such_file_is_not_used(
    what: str, place: Place, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place.save(3, state_of(3))
    (copy,) = place.copies()
    target = tmp_path / "target"
    if what == "cut off":
        os.truncate(copy, 5000)
    elif what == "longer":
        os.truncate(copy, copy.stat().st_size + 1)
    else:
        copy.rename(target)
        if what == "a link":
            copy.symlink_to(target)
        else:
            copy.mkdir()
    assert restored(place) == (3, "committed")
    assert "is bad" in capfd.readouterr().err
    assert what in ("cut off", "longer") or target.exists()
    assert what == "a directory" or not copy.is_symlink()


def test_a_disk_that_fails_while_it_is_read_costs_no_step(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    place.save(3, state_of(3))
    read = bulk_io.read

    def failing(fd: int, *more: Any) -> list[int]:
        if Path(f"/proc/self/fd/{fd}").readlink().is_relative_to(place.disk):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, *more)

    monkeypatch.setattr(bulk_io, "read", failing)
    assert restored(place) == (3, "committed")
    assert "Input/output error" in capfd.readouterr().err
    assert place.copies() == []


@pytest.mark.parametrize("size", [100, 70])
def test_the_same_step_of_a_former_life_is_never_used(
    size: int, place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    """It began anew from nothing, with another seed: step 3 again, of the same epoch and round, with other content."""
    place.save(3, state_of(3), with_disk=False)
    wanted = place.committed(3).stat().st_size
    for seed in range(4, 200):
        shutil.rmtree(place.remote)
        place.save(3, state_of(seed, size=size))
        (copy,) = place.copies()
        if (copy.stat().st_size == wanted) == (size == 100):
            break
    else:
        pytest.fail("the sizes of the files always differ")
    shutil.rmtree(place.remote)
    place.save(3, state_of(3), with_disk=False)
    assert restored(place) == (3, "committed")
    assert not copy.exists()
    assert "is bad" in capfd.readouterr().err


def test_a_step_of_another_round_is_not_even_looked_at(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    place.save(3, state_of(3))
    (copy,) = place.copies()
    other = copy.parent.with_name("step-0000000003-e0-r1")
    copy.parent.rename(other)
    assert restored(place) == (3, "committed")
    assert capfd.readouterr().err == ""
    assert (other / "node-0.h5").exists()


def test_the_directory_of_somebody_else_is_not_read(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    place.save(3, state_of(3))
    (copy,) = place.copies()
    holder = copy.parent.parent
    holder.chmod(0o755)
    assert restored(place) == (3, "committed")
    holder.chmod(0o700)
    place.disk.chmod(0o777)
    assert restored(place) == (3, "committed")
    assert "any user may exchange what is in it" in capfd.readouterr().err
    place.disk.chmod(0o1777)
    assert restored(place) == (3, "local")
    if os.geteuid() == 0:
        os.chown(holder, 12345, 12345)
        assert restored(place) == (3, "committed")
    assert copy.exists()


def test_both_bad_is_as_bad_as_ever(place: Place) -> None:
    place.save(2, state_of(2))
    place.save(3, state_of(3))
    lose(place.committed(3))
    lose(place.copies()[1])
    assert restored(place) == (2, "local")
    with pytest.raises(CorruptCheckpoint):
        place.process()[0].restore(step=3)


def test_damage_that_shows_in_the_middle_of_large_tensors_falls_back_for_that_shard_alone(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 1's copy is damaged; rank 0 still reads its own, whose committed file is lost."""
    states = [state_of(3, rank, 3_000_000) for rank in range(2)]
    place.save(3, *states)
    copies = {path.name: path for path in place.copies()}
    flip(copies["node-1.h5"], 20_000_000)
    lose(place.committed(3, 0))
    assert restored(place, 0, 2) == (3, "local")
    assert restored(place, 1, 2) == (3, "committed")
    assert "does not match its checksum" in capfd.readouterr().err
    assert not copies["node-1.h5"].exists()
    assert copies["node-0.h5"].exists()


def test_a_state_in_place_is_right_after_a_copy_failed_half_way(place: Place) -> None:
    place.save(3, state_of(3, size=3_000_000))
    flip(place.copies()[0], 20_000_000)
    live = {"x": np.zeros(3_000_000, dtype=np.int64), "few": np.zeros(3, dtype=np.int8), "step": 0, "rank": 5}
    found = place.process()[0].restore(live)
    assert found is not None
    assert (live["x"] == state_of(3, size=3_000_000)["x"]).all()


def test_replicated_tensors_come_from_the_file_of_rank_0_where_that_is_here(place: Place) -> None:
    states = [state_of(3) | {"rank": rank} for rank in range(2)]
    place.save(3, *states, layout=REPLICATED)
    for node in range(2):
        lose(place.committed(3, node))
    for rank in range(2):
        process, told = place.process(rank, 2, layout=REPLICATED)
        found = process.restore()
        assert found is not None
        assert (found[1]["rank"], found[1]["x"][1], told.sources) == (rank, 3, ["local"])


def test_another_layout_takes_what_is_here_from_here_and_the_rest_from_the_shared_one(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = np.arange(4000.0).reshape(1000, 4)
    place.save(3, *({"grid": Slab(whole[first : first + 500], (1000, 4), (first, 0))} for first in (0, 500)))
    place.copies()[1].unlink()
    lose(place.committed(3, 0))
    columns = np.zeros((1000, 2))
    process, told = place.process()
    process.restore({"grid": Slab(columns, (1000, 4), (0, 1))})
    assert (columns == whole[:, 1:3]).all()
    assert told.sources == ["committed"]  # not all of it was here
    assert capfd.readouterr().err == ""
    place.save(4, *({"grid": Slab(whole[first : first + 500], (1000, 4), (first, 0))} for first in (0, 500)))
    for copy in place.copies():
        if "step-0000000004" in str(copy):
            flip(copy, 5000)
    columns[:] = 0
    process.restore({"grid": Slab(columns, (1000, 4), (0, 1))})
    assert (columns == whole[:, 1:3]).all()
