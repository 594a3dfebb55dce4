"""Nodes join a real run on this machine, take part in it, and leave it or see its end: one run, in the tests' order."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resilio_hpc.core.ledger import Event, read_ledger
from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S, until

SCRIPT = """
import time
import numpy as np
from resilio_hpc import ckpt, train
run = train.attach()
state = {"x": np.ones(10)}
checkpointer = ckpt.Checkpointer(layout=ckpt.REPLICATED)
begin = (checkpointer.restore(state) or (0,))[0]
for step in run.steps(begin, 1_000_000, save=lambda done: checkpointer.save(done, state), every=10):
    time.sleep(0.02)
"""


class LocalRun:
    """Two nodes train until told to end, and would use three."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "run"
        self.joiner: subprocess.Popen[bytes]
        self._processes: list[subprocess.Popen[bytes]] = []
        (folder / "train.py").write_text(SCRIPT)
        self.launch = self.start("main", 2, "--nnodes", "2:3", "--join-timeout", "1", "--run-dir", "run", "train.py")

    def start(self, name: str, nodes: int, *argv: str) -> subprocess.Popen[bytes]:
        environment = scrubbed(RESILIO_LOCAL_NODES=str(nodes))
        options = [] if "--join" in argv else ["--no-torch"]  # who joins has the run's
        with (self.folder / f"{name}.txt").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", *options, *argv],
                cwd=self.folder, env=environment, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        return process

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.txt").read_text()

    def events(self, kind: str) -> list[Event]:
        directory = self.path / "ledger"
        return [event for event in read_ledger(directory) if event.kind == kind] if directory.is_dir() else []

    def until(self, reached: Callable[[], bool]) -> None:

        def said() -> list[str]:
            return [path.read_text() for path in self.folder.glob("*.txt")]

        until(reached, "what the run does", said, alive=lambda: self.launch.poll() is None, poll_s=0.05)

    def round_of(self, nodes: int) -> bool:
        """Whether ranks of so many nodes have done a step together, in the newest round."""
        rounds = self.events("round")
        number = rounds[-1].fields["round"] if rounds else -1
        return (
            bool(rounds)
            and len(rounds[-1].fields["members"]) == nodes
            and any(event.fields["round"] == number for event in self.events("first_step"))
        )

    def end(self) -> str:
        """End the run in good order; returns its verdict."""
        self.launch.send_signal(signal.SIGTERM)
        self.launch.wait(PATIENCE_S)
        return str(json.loads((self.path / "verdict.json").read_text())["verdict"])

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._processes:
            process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def local_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRun]:
    run = LocalRun(tmp_path_factory.mktemp("run"))
    run.until(lambda: (run.path / "launch.json").exists())
    run.joiner = run.start("first", 1, "--join", "run")  # it waits for a controller
    yield run
    run.close()


def test_a_run_begins(local_run: LocalRun) -> None:
    local_run.until(lambda: bool(local_run.events("first_step")))


def test_a_joiner_that_came_before_there_was_a_controller_takes_part(local_run: LocalRun) -> None:
    run = local_run
    run.until(lambda: run.round_of(3))
    (event,) = run.events("joins")
    assert event.fields["nodes"][0] in run.events("round")[-1].fields["members"]


def test_a_joiner_that_is_warned_leaves_and_the_run_goes_on(local_run: LocalRun) -> None:
    run = local_run
    run.joiner.send_signal(signal.SIGTERM)
    assert run.joiner.wait(PATIENCE_S) == 0
    assert "left in good order: the run goes on without" in run.said("first")
    run.until(lambda: run.round_of(2))


def test_another_joiner_takes_part_in_a_run_that_trains(local_run: LocalRun) -> None:
    run = local_run
    run.joiner = run.start("second", 1, "--join", "run")
    run.until(lambda: run.round_of(3))
    assert len(run.events("joins")) == 2


def test_a_joiner_sees_the_end_of_the_run(local_run: LocalRun) -> None:
    run = local_run
    assert run.end() == "terminated"
    assert run.joiner.wait(PATIENCE_S) == 0
    assert "the run ended while these nodes took part: terminated" in run.said("second")
    assert len(list((run.path / "links").glob("local-*.json"))) == 1  # the verdict is the run's, not the joiner's
