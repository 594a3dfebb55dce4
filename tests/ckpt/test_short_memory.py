"""Snapshots where memory and disk are short: the newest is kept while there is room for one, and each step is said."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.ckpt.coordination import coordinator
from resilio_hpc.ckpt.coordination.coordinator import Place
from resilio_hpc.ckpt.format.restore_point import RestorePoint
from resilio_hpc.ckpt.replication import lost_ranks
from resilio_hpc.ckpt.restore.arena_source import ArenaSource
from resilio_hpc.ckpt.restore.borrowed_source import BorrowedSource
from resilio_hpc.ckpt.restore.restore import restore
from resilio_hpc.ckpt.snapshot import arena, arena_slot
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.boundary_record import RecordWriter
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.own_part import own_part
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.core.errors import SaveRefused
from resilio_hpc.core.tiers import Tier
from tests.support.ckpt.recording_coordinator import RecordingCoordinator
from tests.support.environments import scrubbed
from tests.support.mounts import mounted
from tests.support.waiting import PATIENCE_S

POOL = ThreadPoolExecutor(2)
ROOM = 8 << 20
ONE = ROOM // 8 * 5 // 8  # elements: five eighths of the room, so that there is none for two
OWNER = Owner(0, 0, 1, 1, 0, "own", "run")


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory with room for one snapshot. What should go to disk lies there, too."""
    with mounted(tmp_path / "memory", f"size={ROOM}") as directory:
        yield directory


def pair(memory: Path) -> ArenaPair:
    return ArenaPair(memory, OWNER, memory / "spill")


def state(step: int, size: int = ONE) -> dict[str, Any]:
    return {"x": np.random.default_rng(step).random(size), "step": step, "seen": ["a", step]}


def save(arenas: ArenaPair, step: int, size: int = ONE) -> None:
    Snapshot(arenas, step, flatten(state(step, size)), POOL).finish()


def is_right(held: arena.HeldSnapshot, size: int = ONE) -> bool:
    """Whether it restores to the state of its step, bit by bit."""
    with ArenaSource(held.path) as source:
        found = restore(source, None, POOL)
    wanted = state(held.step, size)
    return found["x"].tobytes() == wanted.pop("x").tobytes() and {name: found[name] for name in wanted} == wanted


def held_steps(directory: Path) -> list[int]:
    held = arena.scan(directory)
    assert all(is_right(one) for one in held)
    return [one.step for one in held]


def test_with_room_for_one_snapshot_each_is_written_over_the_one_before(memory: Path) -> None:
    arenas = pair(memory)
    for step in (1, 2, 3):
        save(arenas, step)
        assert held_steps(memory) == [step]
        assert bool(arenas.only_one) == (step > 1)
    assert "No space left on device" in arenas.only_one


def test_the_only_snapshot_is_not_written_over_while_it_is_written_to_disk(memory: Path) -> None:
    arenas = pair(memory)
    save(arenas, 1)
    pin = arena.pin(memory, 1)
    assert pin is not None
    with pytest.raises(SaveRefused, match=r"room for one snapshot alone \(No space left .* still being written"):
        save(arenas, 2)
    assert held_steps(memory) == [1]
    pin.release()
    save(arenas, 3)
    assert held_steps(memory) == [3]


def test_a_snapshot_that_would_not_fit_into_the_only_arena_leaves_what_is_there(memory: Path) -> None:
    arenas = pair(memory)
    save(arenas, 1)
    with pytest.raises(OSError, match="No space left"):
        save(arenas, 2, size=ONE + ONE // 3)
    assert held_steps(memory) == [1]
    save(arenas, 3)
    assert held_steps(memory) == [3]


def test_the_last_finished_step_takes_no_room_that_others_may_need(memory: Path) -> None:
    arenas = pair(memory)
    save(arenas, 1)
    with pytest.raises(OSError, match="No space left"):
        Snapshot(arenas, 2, flatten(state(2)), POOL, is_last=True)
    assert held_steps(memory) == [1]


def test_with_room_again_there_are_two(memory: Path) -> None:
    arenas = pair(memory)
    for step in (1, 2):
        save(arenas, step)
    subprocess.run(["mount", "-o", f"remount,size={4 * ROOM}", str(memory)], check=True, timeout=60)
    for step in (3, 4):
        save(arenas, step)
        assert held_steps(memory) == [step - 1, step]
        assert arenas.only_one == ""


def test_a_copy_that_fails_in_the_only_arena_leaves_no_torn_snapshot(memory: Path) -> None:
    arenas = pair(memory)
    save(arenas, 1)

    class Failing(ThreadPoolExecutor):
        def submit(self, *_: Any, **__: Any) -> Any:
            raise OSError(errno.EIO, "a device that fails")

    with Failing(1) as pool, pytest.raises(OSError, match="a device that fails"):
        Snapshot(arenas, 2, flatten(state(2)), pool)
    assert held_steps(memory) == []
    save(arenas, 3)
    assert held_steps(memory) == [3]


SAVER = """
import os, sys
from pathlib import Path
from tests.ckpt.test_short_memory import pair, save
arenas = pair(Path(sys.argv[1]))
for step in range(int(sys.argv[2]), 1 << 40):
    save(arenas, step)
    os.write(1, b"%d\\n" % step)
"""


def test_a_rank_killed_at_any_instant_leaves_its_one_snapshot_whole_or_none(memory: Path) -> None:
    first, whole = 1, 0
    for trial in range(3):
        argv = [sys.executable, "-c", SAVER, str(memory), str(first)]
        with subprocess.Popen(argv, env=scrubbed(), stdout=subprocess.PIPE) as rank:
            assert rank.stdout
            told = [int(rank.stdout.readline()) for _ in range(3)][-1]
            time.sleep(0.003 * trial)
            rank.send_signal(signal.SIGKILL)
            told = max([told, *(int(line) for line in rank.stdout)])
        held = held_steps(memory)
        assert held in ([], [told], [told + 1])
        whole += len(held)
        first = told + 2
    save(pair(memory), first)  # the next life finds its way, whatever is left
    assert held_steps(memory) == [first]


def test_a_disk_is_not_filled_in_vain(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system is a tmpfs that is taken for a disk's, since a disk of that size cannot be had everywhere."""
    monkeypatch.setattr(arena_slot, "is_in_memory", lambda fd: False)
    slot = arena_slot.Slot(None, memory / "disk", True, lambda _: None)
    asked: list[int] = []
    fallocate = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, at, size: (asked.append(size), fallocate(fd, at, size)))
    with pytest.raises(OSError, match="No space left"):
        slot.make_room(2 * ROOM)
    assert asked == []
    statvfs = os.fstatvfs(slot._fd)
    monkeypatch.setattr(os, "fstatvfs", lambda fd: os.statvfs("/"))  # others fill it at the same moment
    with pytest.raises(OSError, match="No space left"):
        slot.make_room(2 * ROOM)
    assert asked == [2 * ROOM]
    assert os.statvfs(memory).f_bavail == statvfs.f_bavail
    slot.close()


# -- what a Checkpointer makes of it, and says ---------------------------------------------------------------------


@pytest.fixture
def launcher(memory: Path) -> Iterator[RecordingCoordinator]:
    made = RecordingCoordinator(memory, Place(0, 0, 1, 1, 0, "run"))
    coordinator.use(made)
    yield made
    coordinator.use(None)


def test_each_step_down_and_up_is_told_once(
    launcher: RecordingCoordinator, memory: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint = Checkpointer(tmp_path / "checkpoints", local=memory / "spill")
    for step in (1, 2, 3):
        checkpoint.save(step, state(step))
    assert launcher.rooms == [(2, "one")]
    assert held_steps(memory) == [3]
    handle = checkpoint.save(4, state(4, ONE + ONE // 3))
    assert "No space left on device" in handle.error
    checkpoint.save(5, state(5, ONE + ONE // 3))
    assert launcher.rooms == [(2, "one"), (4, "none")]
    assert held_steps(memory) == [3]
    checkpoint.save(6, state(6))
    assert launcher.rooms[2:] == [(6, "one")]
    assert launcher.taken == [1, 2, 3, 6]
    said = capfd.readouterr().err
    assert said.count("there is room for one snapshot alone") == 1
    assert said.count("step 4 is not saved: No space left on device") == 1
    assert "step 5" not in said


def test_a_snapshot_that_is_gone_is_said_and_the_older_whole_step_is_restored(
    launcher: RecordingCoordinator, memory: Path, tmp_path: Path
) -> None:
    """A kill in the middle of a save has left the only arena empty: the step that was committed is there."""
    coordinator.use(None)
    Checkpointer(tmp_path / "checkpoints").save(1, state(1)).wait("committed", PATIENCE_S)
    coordinator.use(launcher)
    checkpoint = Checkpointer(tmp_path / "checkpoints", local=memory / "spill")
    for step in (2, 3):
        checkpoint.save(step, state(step))
    memory_3, committed_1 = RestorePoint(Tier.MEMORY, 3), RestorePoint(Tier.COMMITTED, 1)
    launcher.restores(memory_3, committed_1)

    def restored() -> int:
        step, found = Checkpointer(tmp_path / "checkpoints", local=memory / "spill").restore() or (-1, None)
        assert found["x"].tobytes() == state(step)["x"].tobytes()
        return step

    assert (restored(), launcher.failed) == (3, [])
    arena.invalidate(memory, 3)
    assert (restored(), launcher.failed) == (1, [memory_3])


# -- what is a rank's own, where others have the rest ------------------------------------------------------------------


def test_a_rank_without_room_restores_the_last_finished_step_from_another_ranks(memory: Path) -> None:
    """Its generators, counters and the like are in memory at each boundary, some kilobytes."""

    def of(rank: int) -> dict[str, Any]:
        return {**state(7), "own": {"rank": rank, "rng": b"%d" % rank}}

    def take(rank: int) -> None:
        arenas = ArenaPair(memory, Owner(rank, rank, 2, 2, 0, "replicated", "run"), memory / "spill")
        Snapshot(arenas, 7, flatten(of(rank)), POOL, is_last=True).finish()

    RecordWriter(memory, 1, 2, 0).write(7, own_part(of(1)), False)
    take(0)
    with pytest.raises(OSError, match="No space left"):
        take(1)
    borrowed = lost_ranks.borrowed(memory, 1, 7, 2)
    assert borrowed is not None
    with BorrowedSource(borrowed) as source:
        found = restore(source, None, POOL)
    assert found["x"].tobytes() == of(1)["x"].tobytes()
    assert found["own"] == of(1)["own"]
