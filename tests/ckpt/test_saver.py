"""The saver as a process: it writes what is right, refuses what is not, and its death harms nothing."""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import pytest

from resilio_hpc import ckpt
from resilio_hpc.ckpt.format.manifest import Layout
from resilio_hpc.ckpt.restore.arena_source import ArenaSource
from resilio_hpc.ckpt.saver.messages import (
    Answer,
    Commit,
    Committed,
    Persist,
    Persisted,
    Request,
    SaverFailed,
    decode_answer,
)
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.ckpt.store import checkpoint_index, fence
from resilio_hpc.ckpt.store.retention import Retention
from resilio_hpc.ckpt.store.staging import staging_directory
from resilio_hpc.core.errors import CorruptCheckpoint, LayoutMismatch
from resilio_hpc.core.json_lines import encode_line
from resilio_hpc.core.process import run
from tests.support.mounts import mounted

POOL = ThreadPoolExecutor(1)
WORLD = 2


class Saver:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "resilio_hpc.ckpt.saver.saver"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input: IO[bytes] = self.process.stdin
        self.output: IO[bytes] = self.process.stdout

    def mapped(self, directory: Path) -> list[str]:
        """Files of a directory that it has mapped."""
        time.sleep(0.1)  # it answers first
        lines = Path(f"/proc/{self.process.pid}/maps").read_text().splitlines()
        return [line.split(None, 5)[5] for line in lines if f" {directory}/" in line]

    def send(self, request: Request) -> None:
        self.input.write(encode_line(request))
        self.input.flush()

    def ask(self, request: Request) -> Answer:
        self.send(request)
        return decode_answer(self.output.readline())

    def close(self) -> int:
        self.input.close()
        code = self.process.wait(20)
        self.output.close()
        return code


@pytest.fixture
def saver() -> Iterator[Saver]:
    process = Saver()
    yield process
    if process.process.poll() is None:
        process.process.kill()
    process.close()


@pytest.fixture
def shm() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="resilio-test-", dir="/dev/shm") as name:
        yield Path(name)


def take(directory: Path, step: int, size: int = 1000, layout: Layout = "own") -> list[str]:
    """Snapshots of ``step`` of both ranks of this node; their arenas."""
    paths = []
    for rank in range(WORLD):
        arenas = ArenaPair(directory, Owner(rank, rank, WORLD, WORLD, 0, layout, "run"), directory / "spill")
        state = {"x": np.full(size, 100 * step + (rank if layout == "own" else 0)), "rank": rank}
        paths.append(str(Snapshot(arenas, step, flatten(state), POOL).finish()[0]))
        arenas.close()
    return paths


def committed_by(saver: Saver, shm: Path, directory: Path, steps: Sequence[int], retention: Retention) -> list[int]:
    """What is there after these commits, each a day after the one before."""
    for number, step in enumerate(steps):
        answer = saver.ask(persist(take(shm, step), step, directory))
        assert isinstance(answer, Persisted)
        request = Commit(step, 1, 0, WORLD, str(directory), [answer.record], retention)
        assert isinstance(saver.ask(request), Committed)
        for known in checkpoint_index.committed_steps(directory):
            when = time.time() - 86400 * (number + 1 - steps.index(known))
            os.utime(checkpoint_index.step_directory(directory, known) / "manifest.json", (when, when))
    return checkpoint_index.committed_steps(directory)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"keep_last": 2}, [5, 6]),
        ({"keep_last": 1, "keep_every": 2}, [2, 4, 6]),
        ({"keep_last": 9, "keep_hours": 60}, [4, 5, 6]),
        ({"keep_last": 9, "keep_gb": 3.5}, [4, 5, 6]),
        ({"keep_last": 1, "keep_every": 2, "keep_gb": 2.5}, [4, 6]),
    ],
)
def test_a_commit_keeps_what_it_was_told_to(
    settings: dict[str, float], kept: list[int], saver: Saver, shm: Path, tmp_path: Path
) -> None:
    """``keep_gb`` here in sizes of a step."""
    (tmp_path / "one").mkdir()
    assert committed_by(saver, shm, tmp_path / "one", [1], Retention()) == [1]
    size = checkpoint_index.manifest_of(tmp_path / "one", 1).size_bytes / 1e9
    given = {name: value * size if name == "keep_gb" else value for name, value in settings.items()}
    (tmp_path / "all").mkdir()
    retention = Retention(**given)  # type: ignore[arg-type]
    assert committed_by(saver, shm, tmp_path / "all", range(1, 7), retention) == kept


def persist(paths: list[str], step: int, directory: Path, epoch: int = 1) -> Persist:
    return Persist(step, epoch, 0, WORLD, 0, paths, str(directory))


def commit(answer: Answer, directory: Path, epoch: int = 1) -> Commit:
    assert isinstance(answer, Persisted), answer
    return Commit(answer.step, epoch, 0, WORLD, str(directory), [answer.record])


def restored(directory: Path, rank: int, monkeypatch: pytest.MonkeyPatch, world: int = WORLD, **options: str) -> object:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world))
    return ckpt.Checkpointer(directory, **options).restore()  # type: ignore[arg-type]


def test_a_step_is_persisted_committed_and_restored_by_each_rank(
    saver: Saver, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    persisted = saver.ask(persist(take(shm, 3), 3, tmp_path))
    assert checkpoint_index.committed_steps(tmp_path) == []
    assert isinstance(saver.ask(commit(persisted, tmp_path)), Committed)
    assert checkpoint_index.committed_steps(tmp_path) == [3]
    assert checkpoint_index.manifest_of(tmp_path, 3).epoch == 1
    for rank in range(WORLD):
        step, state = restored(tmp_path, rank, monkeypatch)  # type: ignore[misc]
        assert (step, state["rank"], state["x"][0]) == (3, rank, 300 + rank)
    assert saver.close() == 0


def test_replicated_tensors_are_stored_once_and_fit_any_world(
    saver: Saver, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    persisted = saver.ask(persist(take(shm, 3, size=500_000, layout="replicated"), 3, tmp_path))
    assert isinstance(persisted, Persisted)
    assert 4_000_000 < persisted.record.size_bytes < 5_000_000
    saver.ask(commit(persisted, tmp_path))
    for world, rank in ((2, 0), (2, 1), (3, 2), (1, 0)):
        _, state = restored(tmp_path, rank, monkeypatch, world, layout=ckpt.REPLICATED)  # type: ignore[misc]
        assert state["rank"] == rank % 2
        assert (state["x"] == 300).all()


def test_a_world_of_another_size_cannot_take_tensors_that_are_each_ranks_own(
    saver: Saver, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver.ask(commit(saver.ask(persist(take(shm, 3), 3, tmp_path)), tmp_path))
    with pytest.raises(LayoutMismatch, match="saved by 2 processes"):
        restored(tmp_path, 0, monkeypatch, 3)


def damaged(paths: list[str]) -> list[str]:
    """The arenas, one bit of the second one's tensor flipped since its snapshot was taken."""
    with ArenaSource(Path(paths[1])) as source:
        offset = source.tensors[0].offset
    with open(paths[1], "r+b") as file:
        file.seek(offset + 77)
        (byte,) = file.read(1)
        file.seek(offset + 77)
        file.write(bytes([byte ^ 1]))
    return paths


def test_memory_that_went_bad_is_not_persisted_where_no_older_step_would_remain(
    saver: Saver, shm: Path, tmp_path: Path
) -> None:
    verify = Retention(keep_last=1).needs_verified_writes
    asked = msgspec.structs.replace(persist(damaged(take(shm, 3, size=9000)), 3, tmp_path), verify=verify)
    answer = saver.ask(asked)
    assert isinstance(answer, SaverFailed)
    assert "tensor x does not match its checksum" in answer.error
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_memory_that_went_bad_is_found_by_the_restore_and_the_step_before_remains(
    saver: Saver, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retention = Retention(keep_last=2)
    for step, paths in ((3, take(shm, 3, size=9000)), (4, damaged(take(shm, 4, size=9000)))):
        asked = msgspec.structs.replace(persist(paths, step, tmp_path), verify=retention.needs_verified_writes)
        answer = commit(saver.ask(asked), tmp_path)
        assert isinstance(saver.ask(msgspec.structs.replace(answer, retention=retention)), Committed)
    with pytest.raises(CorruptCheckpoint, match="x does not match its checksum"):
        restored(tmp_path, 1, monkeypatch)
    shutil.rmtree(checkpoint_index.step_directory(tmp_path, 4))
    assert restored(tmp_path, 1, monkeypatch)[0] == 3  # type: ignore[index]


def test_an_arena_that_went_on_is_refused(saver: Saver, shm: Path, tmp_path: Path) -> None:
    paths = take(shm, 3)
    answer = saver.ask(persist(paths, 4, tmp_path))
    assert isinstance(answer, SaverFailed)
    assert "holds step 3" in answer.error
    arena.invalidate(shm, 3)
    assert isinstance(saver.ask(persist(paths, 3, tmp_path)), SaverFailed)


def test_arenas_stay_mapped_until_they_are_removed_or_replaced(saver: Saver, shm: Path, tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        assert isinstance(saver.ask(persist(take(shm, step, size=1000 * step), step, tmp_path)), Persisted)
    mapped = saver.mapped(shm)
    assert sorted({Path(path).name for path in mapped}) == [
        f"rank{rank}.slot{slot}" for rank in (0, 1) for slot in (0, 1)
    ]
    assert len(mapped) == 4, "each once, though they have grown"
    arena.remove_slots(shm)
    paths = take(shm, 5)
    assert isinstance(saver.ask(persist(paths, 5, tmp_path)), Persisted)
    assert sorted(saver.mapped(shm)) == sorted(paths)


def test_an_old_epoch_gets_no_commit(saver: Saver, shm: Path, tmp_path: Path) -> None:
    answer = saver.ask(persist(take(shm, 3), 3, tmp_path))
    fence.raise_fence(tmp_path, 2)
    refused = saver.ask(commit(answer, tmp_path))
    assert isinstance(refused, SaverFailed)
    assert "epoch 2 has taken over" in refused.error
    assert checkpoint_index.committed_steps(tmp_path) == []


def test_nonsense_on_its_input_does_not_end_it(saver: Saver, shm: Path, tmp_path: Path) -> None:
    saver.input.write(b'{"type": "Format", "disk": "/"}\nnonsense\n')
    saver.input.flush()
    assert isinstance(decode_answer(saver.output.readline()), SaverFailed)
    assert isinstance(decode_answer(saver.output.readline()), SaverFailed)
    assert isinstance(saver.ask(persist(take(shm, 1), 1, tmp_path)), Persisted)


def test_a_saver_killed_while_it_writes_leaves_the_older_step(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Saver()
    first.ask(commit(first.ask(persist(take(shm, 1), 1, tmp_path)), tmp_path))
    first.close()
    rng = random.Random(3)
    paths = take(shm, 2, size=3_000_000)
    (shm / "warm").mkdir()
    warm = take(shm / "warm", 1)
    for _ in range(4):
        victim = Saver()
        victim.send(persist(warm, 1, tmp_path / "warm"))  # its answer shows that it is at work
        victim.output.readline()
        victim.send(persist(paths, 2, tmp_path))
        time.sleep(rng.random() * 0.08)
        victim.process.send_signal(signal.SIGKILL)
        victim.close()
        assert checkpoint_index.committed_steps(tmp_path) == [1]
        assert restored(tmp_path, 1, monkeypatch)[0] == 1  # type: ignore[index]
    last = Saver()
    last.ask(commit(last.ask(persist(paths, 2, tmp_path)), tmp_path))
    last.close()
    assert restored(tmp_path, 1, monkeypatch)[0] == 2  # type: ignore[index]


def test_the_saver_dies_with_its_agent(tmp_path: Path) -> None:
    """Even when the pipe stays open in somebody else's hands."""
    read, write = os.pipe()
    code = (
        "import subprocess, sys, time\n"
        "argv = [sys.executable, '-m', 'resilio_hpc.ckpt.saver.saver']\n"
        f"p = subprocess.Popen(argv, stdin={read}, stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(60)"
    )
    os.write(write, b"nonsense\n")  # its answer shows that it runs
    agent = subprocess.Popen([sys.executable, "-c", code], pass_fds=[read], stdout=subprocess.PIPE)
    assert agent.stdout is not None
    pid = int(agent.stdout.readline())
    pidfd = os.pidfd_open(pid)
    agent.kill()
    agent.wait()
    agent.stdout.close()
    assert select.select([pidfd], [], [], 10)[0], "the saver outlived its agent"
    for fd in (pidfd, read, write):
        os.close(fd)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", "size=10m") as directory:
        yield directory


def test_a_full_disk_fails_the_save_and_harms_neither_saver_nor_older_steps(
    saver: Saver, shm: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver.ask(commit(saver.ask(persist(take(shm, 1), 1, small_disk)), small_disk))
    answer = saver.ask(persist(take(shm, 2, size=700_000), 2, small_disk))
    assert isinstance(answer, SaverFailed)
    assert "space" in answer.error
    assert not [path for path in small_disk.rglob("*") if path.name.endswith(".tmp")]
    assert restored(small_disk, 1, monkeypatch)[0] == 1  # type: ignore[index]
    assert isinstance(saver.ask(commit(saver.ask(persist(take(shm, 3), 3, small_disk)), small_disk)), Committed)
    assert checkpoint_index.committed_steps(small_disk) == [1, 3]


@pytest.mark.parametrize("free", [0, 4096, 12_288, 50_000])
def test_space_that_vanishes_while_libhdf5_writes_is_only_a_failed_save(free: int, shm: Path, small_disk: Path) -> None:
    paths = take(shm, 2, size=5000)
    code = (
        "import sys\n"
        "from resilio_hpc.ckpt.store.backend import Store; from resilio_hpc.ckpt.saver import saver\n"
        "from resilio_hpc.ckpt.saver.messages import decode_order\n"
        "Store.check_space = lambda self, directory, size, former=None: None\n"
        "for line in sys.stdin.buffer: print(type(saver.serve(decode_order(line))).__name__)\n"
    )
    staging = staging_directory(small_disk, 2, 1, 0)
    staging.mkdir()
    room = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(b"x" * (room.f_bavail * room.f_frsize - free))
    line = encode_line(persist(paths, 2, small_disk)).decode()
    done = run([sys.executable, "-c", code], 60, stdin=line * 2)
    assert done.stdout.split() == ["SaverFailed", "SaverFailed"]
    assert list(staging.iterdir()) == []
