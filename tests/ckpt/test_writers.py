"""Two jobs in one directory, two saves at once: each gets a line, and neither loses a step to the other in silence."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.ckpt.dcp.__init__ import ResilioWriter
from resilio_hpc.ckpt.format.manifest import Writer, read_manifest, write_manifest
from resilio_hpc.ckpt.store import checkpoint_index, writers
from resilio_hpc.ckpt.store.commit import open_staging
from resilio_hpc.ckpt.store.mounts import store_of
from resilio_hpc.ckpt.store.staging import staging_directory
from resilio_hpc.core.errors import CheckpointError
from tests.support.waiting import PATIENCE_S, until

ELSEWHERE = Writer("other", "n7", "another boot", 77, 123)


def save(checkpoint: Checkpointer, step: int) -> None:
    checkpoint.save(step, {"x": np.full(1000, step)}).wait(timeout_s=PATIENCE_S)


class OtherJob:
    """A process that does something, says so and lives on until ``end``."""

    def __init__(self, act: Callable[[], object]) -> None:
        done, self._done = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                act()
                os.write(self._done, b"done")
                signal.pause()
            finally:
                os._exit(1)
        os.close(self._done)
        assert os.read(done, 4) == b"done"
        os.close(done)

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def test_two_jobs_in_one_directory_are_told_and_lose_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ours = Checkpointer(tmp_path, keep_last=1)
    save(ours, 1)

    def act() -> None:
        theirs = Checkpointer(tmp_path, keep_last=1)
        assert theirs.restore() is not None
        save(theirs, 2)
        with pytest.raises(CheckpointError, match=f"step 1 is another job's: another job .process {os.getppid()} on "):
            save(theirs, 1)
        staging = staging_directory(tmp_path, 0, 0, 0, "beef")
        writers.make_staging(staging, writers.this_process("other"))

    other = OtherJob(act)
    try:
        said = capfd.readouterr().err
        assert said.count(f"another job (process {os.getpid()} on ") == 2  # at the restore; and of the save that failed
        save(ours, 3)
        save(ours, 4)
        assert ours.steps() == [2, 4]
        assert list(tmp_path.glob(".staging-*-sbeef"))
        said = capfd.readouterr().err
        assert said.count("\n") == said.count(f"another job (process {other.pid} on ") == 1
    finally:
        other.end()
    save(ours, 5)
    assert ours.steps() == [5]
    assert not list(tmp_path.glob(".staging-*"))


def test_a_job_on_another_machine_shows_itself_by_what_it_commits(tmp_path: Path) -> None:
    me = writers.this_process("mine")
    Checkpointer(tmp_path).save(1, {"x": 1}).wait(timeout_s=PATIENCE_S)
    _sign(tmp_path, 1, 1)
    assert writers.others_at_work(tmp_path, me, checkpoint_index.committed(tmp_path)) == {}  # it may be long dead
    shutil.copytree(checkpoint_index.step_directory(tmp_path, 1), checkpoint_index.step_directory(tmp_path, 2))
    _sign(tmp_path, 2, 2)
    assert writers.others_at_work(tmp_path, me, checkpoint_index.committed(tmp_path)) == {2: ELSEWHERE}


def _sign(directory: Path, step: int, order: int) -> None:
    """Make a step one of a job on another machine."""
    path = checkpoint_index.step_directory(directory, step) / checkpoint_index.MANIFEST
    manifest = read_manifest(path.read_bytes(), 1)
    path.write_bytes(write_manifest(msgspec.structs.replace(manifest, step=step, order=order, writer=ELSEWHERE)))


def test_what_another_machine_is_writing_stays_as_long_as_it_changes(tmp_path: Path) -> None:
    writers.make_staging(tmp_path, ELSEWHERE)
    for size in (1, 2):
        (tmp_path / "node-0.h5").write_bytes(bytes(size))
        assert writers.at_work(tmp_path, True, stall_s=0) == ELSEWHERE
    assert writers.at_work(tmp_path, True, stall_s=1000) == ELSEWHERE
    assert writers.at_work(tmp_path, True, stall_s=0) is None


class Waiting(DefaultSavePlanner):
    """Its save is under way until the gate opens."""

    def __init__(self, reached: threading.Event, gate: threading.Event) -> None:
        super().__init__()
        self._reached, self._gate = reached, gate

    def lookup_object(self, index: Any) -> Any:
        self._reached.set()
        assert self._gate.wait(PATIENCE_S)
        return super().lookup_object(index)


@pytest.mark.filterwarnings("ignore")
def test_saves_in_the_background_may_overlap(tmp_path: Path) -> None:
    reached, gate = threading.Event(), threading.Event()
    state = {"x": torch.ones(1000)}
    first = dcp.async_save(state, storage_writer=ResilioWriter(tmp_path, 1), planner=Waiting(reached, gate))
    assert reached.wait(PATIENCE_S)
    with pytest.raises(dcp.CheckpointException, match=r"step 1 is being saved to .* already, by process") as refused:
        dcp.save(state, storage_writer=ResilioWriter(tmp_path, 1))
    dcp.save(state, storage_writer=ResilioWriter(tmp_path, 2))
    checkpoint = Checkpointer(tmp_path)
    save(checkpoint, 3)
    gate.set()
    first.result()
    assert sorted(checkpoint.steps()) == [1, 2, 3]
    assert refused.value.failures
    until(lambda: not list(tmp_path.glob(".staging-*")), "nothing is left")


@pytest.mark.filterwarnings("ignore")
def test_what_a_save_left_that_failed_goes_with_the_next(tmp_path: Path) -> None:
    class Failing(DefaultSavePlanner):
        def lookup_object(self, index: Any) -> Any:
            raise ValueError("no such thing")

    with pytest.raises(dcp.CheckpointException):
        dcp.save({"x": torch.ones(3)}, storage_writer=ResilioWriter(tmp_path, 1), planner=Failing())
    assert len(list(tmp_path.glob(".staging-*"))) == 1
    dcp.save({"x": torch.ones(3)}, storage_writer=ResilioWriter(tmp_path, 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-0000000002"]


def test_results_of_another_step_are_not_committed(tmp_path: Path) -> None:
    """As when saves of one process group overlap, and the processes' collectives get mixed up."""
    open_staging(tmp_path, 1, 0, 0, writers.this_process("mine"))
    result = dcp.storage.WriteResult(
        dcp.metadata.MetadataIndex("node-0.h5"), 1, msgspec.json.encode((2, {"node_rank": 0, "file": "node-0.h5",
            "size_bytes": 1, "layout": "own", "ranks": []})),
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="step 1: a process has written step 2: saves of one process group do"):
        ResilioWriter(tmp_path, 1).finish(dcp.metadata.Metadata({}), [[result]])


def test_what_a_failed_save_left_goes_with_the_next_of_another_checkpointer(tmp_path: Path) -> None:
    """Of the same process, which lives."""
    (tmp_path / "epoch-fence").write_text("9\n")
    with pytest.raises(CheckpointError, match="epoch 0 may not commit any more"):
        save(Checkpointer(tmp_path), 1)
    (tmp_path / "epoch-fence").unlink()
    assert list(tmp_path.glob(".staging-*"))
    save(Checkpointer(tmp_path), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-0000000002"]


def test_of_two_jobs_that_commit_a_step_at_the_same_time_one_has_it(tmp_path: Path) -> None:
    """The other one's step comes between the look and the exchange of names."""
    checkpoint = Checkpointer(tmp_path / "steps")
    save(checkpoint, 1)
    (manifest,) = checkpoint_index.committed(tmp_path / "steps")
    step = checkpoint_index.step_directory(tmp_path / "steps", 1)
    me = writers.this_process("mine")

    def theirs_comes(former: Path) -> None:
        signed = msgspec.structs.replace(manifest, writer=ELSEWHERE, order=9)
        (former / checkpoint_index.MANIFEST).write_bytes(write_manifest(signed))
        writers.check_former(tmp_path / "steps", me, signed)

    staging = staging_directory(tmp_path / "steps", 1, 0, 0, "abc")
    shutil.copytree(step, staging)
    writers.others_at_work(tmp_path / "steps", me, [manifest])  # what was there when this job began
    with pytest.raises(CheckpointError, match=r"step 1 is another job's: another job .process 77 on n7. writes"):
        store_of(step).put_in_place(staging, step, theirs_comes)
    assert checkpoint_index.manifest_of(tmp_path / "steps", 1).writer == ELSEWHERE
