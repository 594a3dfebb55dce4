"""Real launches on this machine, several in one place, told to end at once, and at the very end of training."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.launch.rundir import run_claim
from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S, until

WAITS = """
import os, sys, time
print("began", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
"""
ENDS_BADLY = """
import os, signal
from resilio_hpc import train
from resilio_hpc.ckpt import Checkpointer

run, state = train.attach(), {"x": 1.0}
checkpoint = Checkpointer()
restored = checkpoint.restore(state)
start = restored[0] if restored else 0
for step in run.steps(start, 4, save=lambda done: checkpoint.save(done, state), every=2):
    pass
if run.round == 0:
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Launched(subprocess.Popen[str]):
    """``resilio-launch`` without torch, in the run directory ``run`` of a folder."""

    def __init__(self, folder: Path, script: str = "waits.py") -> None:
        self.run_path = folder / "run"
        self.file = folder / f"launch-{len(list(folder.glob('launch-*')))}.txt"
        argv = [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--no-torch", "--run-dir", "run", script]
        with self.file.open("w") as output:
            super().__init__(argv, cwd=folder, env=scrubbed(), stdout=output, stderr=output, text=True)

    def said(self) -> str:
        return self.file.read_text()

    def until(self, reached: Callable[[], Any], what: str) -> None:
        until(reached, what, self.said, alive=lambda: self.poll() is None)

    def verdict(self) -> dict[str, Any]:
        found = json.loads((self.run_path / "verdict.json").read_text())
        assert isinstance(found, dict)
        return found


Launch = Callable[..., Launched]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    (tmp_path / "waits.py").write_text(WAITS)
    (tmp_path / "ends_badly.py").write_text(ENDS_BADLY)
    begun: list[Launched] = []

    def begin(script: str = "waits.py") -> Launched:
        begun.append(Launched(tmp_path, script))
        return begun[-1]

    yield begin
    for each in begun:
        if each.poll() is None:
            each.kill()
            each.wait()


@pytest.mark.slow
def test_a_run_in_use_is_refused_and_one_whose_launch_was_killed_goes_on(launch: Launch, tmp_path: Path) -> None:
    first = launch()
    first.until(lambda: "began" in first.said(), "the first launch's rank")
    second = launch()
    assert second.wait(PATIENCE_S) == 2
    assert f"in use: process {first.pid} on" in second.said()
    assert second.said().count("\n") == 1
    assert len(run_claim.newest(first.run_path, 9)) == 1  # nothing was taken from the first one
    first.kill()
    first.wait()
    (tmp_path / "go").touch()
    third = launch()
    assert third.wait(PATIENCE_S) == 0, third.said()
    assert third.verdict()["verdict"] == "completed"


def test_an_order_to_stop_that_comes_while_the_agent_starts_is_kept(launch: Launch) -> None:
    one = launch()
    one.until(lambda: "everything is kept" in one.said(), "the launch")  # its agent is being started
    one.terminate()
    assert one.wait(PATIENCE_S) == 143, one.said()
    assert one.verdict()["verdict"] == "terminated"
    assert "began" not in one.said()


@pytest.mark.slow
def test_a_restart_after_the_last_step_ends_well(launch: Launch) -> None:
    one = launch("ends_badly.py")
    assert one.wait(PATIENCE_S) == 0, one.said()
    assert one.verdict()["restarts"] == 1
    assert "restoring step 4" in one.said()
    assert "steps to do again" not in one.said()


@pytest.mark.slow
def test_a_run_whose_directory_is_removed_ends_with_its_ranks(launch: Launch, tmp_path: Path) -> None:
    one = launch()
    one.until(lambda: "began" in one.said(), "the rank")
    shutil.rmtree(one.run_path)
    one.until(lambda: "was removed" in one.said(), "word of that")
    (tmp_path / "go").touch()
    assert one.wait(PATIENCE_S) == 0, one.said()
    assert "completed: as its agents have told" in one.said()
    assert not (one.run_path / "ledger").exists()
    for left in Path("/tmp").glob(f"resilio-{os.geteuid()}-*"):
        assert str(left) not in one.said() or shutil.rmtree(left) is None


@pytest.mark.slow
def test_a_zygote_that_was_stopped_goes_on(launch: Launch, tmp_path: Path) -> None:
    one = launch()
    one.until(lambda: "began" in one.said(), "the rank")
    (spawner,) = [pid for pid in below(one.pid) if Path(f"/proc/{pid}/comm").read_text() == "resilio-zygote\n"]
    os.kill(spawner, signal.SIGSTOP)
    one.until(lambda: "was stopped from outside: continued" in one.said(), "that it is found")
    (tmp_path / "go").touch()
    assert one.wait(PATIENCE_S) == 0, one.said()


def below(pid: int) -> list[int]:
    """The descendants of a process."""
    children = [int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in
                (task / "children").read_text().split()]  # fmt: skip
    return children + [each for child in children for each in below(child)]
