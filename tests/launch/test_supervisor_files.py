"""A supervisor sees the verdict and keeps its ledger, and waits for no run directory that hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.launch.rundir import run_directory
from resilio_hpc.launch.rundir.run_directory import RunIdentity
from resilio_hpc.launch.supervisor.supervisor_files import SupervisorFiles
from tests.support.waiting import until


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunIdentity:
    monkeypatch.setenv("RESILIO_LOCAL_DIR", str(tmp_path / "local"))
    return run_directory.open_run(tmp_path / "run")


@pytest.fixture
def files(run: RunIdentity) -> Iterator[SupervisorFiles]:
    made = SupervisorFiles(run, "7", "7-supervisor-main")
    yield made
    hang(made, signal.SIGCONT)
    made._storage.close(10.0)


def hang(files: SupervisorFiles, number: int = signal.SIGSTOP) -> None:
    """As a child in uninterruptible sleep: it answers nothing."""
    try:
        os.kill(files._storage._process.pid, number)
    except ProcessLookupError:
        pass


def tick_until(files: SupervisorFiles, reached: Callable[[], bool]) -> None:
    until(lambda: files.tick(time.monotonic(), wait_s=0.02) or reached(), "what the files show", poll_s=0.0)


def seen(files: SupervisorFiles, moment: float) -> Callable[[], bool]:
    return lambda: files.seen_since(moment, time.monotonic())


def test_it_sees_the_verdict_of_its_own_part(files: SupervisorFiles, run: RunIdentity) -> None:
    run_directory.expect_verdict(run.path, "7")
    run_directory.write_verdict(run.path, "6", {"verdict": "time_limit"})
    tick_until(files, seen(files, time.monotonic()))
    assert files.verdict is None
    run_directory.write_verdict(run.path, "7", {"verdict": "completed"})
    tick_until(files, lambda: files.verdict is not None)
    assert (files.verdict or {})["verdict"] == "completed"


def test_while_it_hangs_nothing_is_waited_for_and_afterwards_all_is_there(
    files: SupervisorFiles, run: RunIdentity
) -> None:
    tick_until(files, seen(files, 0.0))
    hang(files)
    began = time.monotonic()
    for number in range(50):  # a call that waited for the child would never return
        files.ledger.append("agent_ended", node=f"n{number}")
        files.move_end("7", float(number))
        files.tick(time.monotonic())
        assert not files.seen_since(began, time.monotonic())
    hang(files, signal.SIGCONT)
    tick_until(files, seen(files, began))
    tick_until(files, lambda: len(read_ledger(run.path / "ledger")) == 50)


def test_what_it_leaves(files: SupervisorFiles, run: RunIdentity, tmp_path: Path) -> None:
    files.ledger.append("launch_ends", verdict="completed")
    files.close()
    assert [event.kind for event in read_ledger(run.path / "ledger")] == ["launch_ends"]
    assert list((tmp_path / "local").iterdir()) == []
