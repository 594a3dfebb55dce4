"""The save at the end of training: refused while those before it are being written, it is made again."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from resilio_hpc.ckpt import Checkpointer, SaveHandle
from resilio_hpc.ckpt.coordination import agent_link
from resilio_hpc.ckpt.saver import saver_process
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.core.errors import CheckpointError, SaveRefused
from resilio_hpc.core.rank_link import Finished, Restored, SaveProgress, SnapshotTaken
from resilio_hpc.core.tiers import Stage
from resilio_hpc.train import Run
from resilio_hpc.train import run as run_module
from tests.support.train.strict_agent import Peer, StrictAgent
from tests.support.waiting import PATIENCE_S, until


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Run, Peer]]:
    """A rank alone, and the agent's end of its link."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        agent = StrictAgent(Path(directory) / "agent")
        environment = agent.environment() | {"RESILIO_ARENA_DIR": directory}
        monkeypatch.setattr(agent_link, "_link", None)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        run = run_module._attach(environment)
        yield run, agent.accept()
        agent.close()
        assert run._link is not None
        run._link._link.close()


def in_thread(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


class Noted:
    """A save that notes when it begins to be waited for, and when that is over."""

    def __init__(self, handle: SaveHandle, notes: list[str]) -> None:
        self.handle, self.notes = handle, notes

    def wait(self, stage: Literal["committed"]) -> None:
        self.notes.append("waits")
        self.handle.wait(stage)
        self.notes.append("committed")


def test_it_waits_for_an_arena(launched: tuple[Run, Peer], capfd: pytest.CaptureFixture[str]) -> None:
    """Both are being written: of one step, which some other node gave up, and of the next."""
    run, agent = launched
    run = replace(run, _patience_s=0.05)
    notes: list[str] = []
    checkpoint, state = Checkpointer(), {"x": np.zeros(1000)}
    assert checkpoint.restore(state) is None
    assert agent.hear(Restored).step == -1
    arenas = Path(os.environ["RESILIO_ARENA_DIR"])
    pins: list[arena.Pin] = []

    def save(step: int) -> Noted:
        handle = checkpoint.save(step, state)
        if step in (1, 2):
            pin = arena.pin(arenas, step)
            assert pin is not None
            pins.append(pin)
        return Noted(handle, notes)

    def train() -> None:
        for step in run.steps(0, 4, save=save, every=1):
            state["x"][:] = step

    training = in_thread(train)
    assert [agent.hear(SnapshotTaken).step for _ in (1, 2)] == [1, 2]
    said: list[str] = []

    def is_told() -> bool:
        said.append(capfd.readouterr().err)
        return "rank 0: still waiting: step 4 was not saved (committed): both arenas" in "".join(said)

    until(is_told, "a user is told", lambda: said)
    notes.clear()
    pins[0].release()
    assert agent.hear(SnapshotTaken).step == 4
    until(lambda: notes == ["waits"], "it is waited for", lambda: notes)
    notes.append("told")
    agent.tell(SaveProgress(4, Stage.COMMITTED))
    assert agent.hear(Finished) == Finished(4)
    training.join(PATIENCE_S)
    assert notes == ["waits", "told", "committed"]
    pins[1].release()
    assert "".join(said).count("still waiting") == 1


def test_without_a_launcher_it_waits_longer_than_the_others(tmp_path: Path) -> None:
    checkpoint = Checkpointer(tmp_path, patience_s=0.05)
    checkpoint.save(1, {"x": 1}).wait(timeout_s=PATIENCE_S)
    pid = saver_process._idle[-1]._process.pid
    os.kill(pid, signal.SIGSTOP)
    saves: list[int] = []

    def save(step: int) -> SaveHandle:
        saves.append(step)
        return checkpoint.save(step, {"x": step})

    training = in_thread(lambda: list(run_module._attach({}).steps(1, 6, save=save, every=1)))
    until(lambda: saves.count(6) > 3, "the last save is made again", lambda: saves)
    assert training.is_alive() and checkpoint.steps() == [1]
    os.kill(pid, signal.SIGCONT)
    training.join(PATIENCE_S)
    assert not training.is_alive() and checkpoint.steps() == [1, 2, 6]


class Failing:
    """A save that fails for good, or is refused so many times."""

    def __init__(self, refusals: int, error: CheckpointError | None = None) -> None:
        self.refusals, self.error, self.saves = refusals, error, 0

    def __call__(self, step: int) -> Failing:
        self.saves += 1
        return self

    def wait(self, stage: str) -> None:
        if self.saves <= self.refusals:
            raise SaveRefused("not yet")
        if self.error is not None:
            raise self.error


def test_what_fails_for_good_is_not_tried_again() -> None:
    save = Failing(0, CheckpointError("No space left on device"))
    with pytest.raises(CheckpointError, match="No space left"):
        list(run_module._attach({}).steps(0, 2, save=save, every=2))
    assert save.saves == 1


@pytest.mark.parametrize("every", [0, 2], ids=["made at the end alone", "also a save on the way"])
def test_it_is_made_again_as_often_as_it_is_refused(every: int) -> None:
    save = Failing(3)
    assert list(run_module._attach({}).steps(0, 2, save=save, every=every)) == [0, 1]
    assert save.saves == 4
