"""Joiners' nodes end with a run whose own job was cancelled, and outlive every other end of it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from resilio_hpc.launch.chain import handover
from resilio_hpc.launch.rundir import run_claim, run_directory
from resilio_hpc.launch.supervisor.joiner import Joiner
from resilio_hpc.launch.supervisor.owner_watch import OwnerState, OwnerWatch, state_of
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.commands import PartEnd
from tests.support.waiting import PATIENCE_S


@pytest.mark.parametrize(
    ("state", "cancelled"),
    [
        ("CANCELLED", "job 7 was cancelled by user 20001"),
        ("COMPLETING", ""),
        ("RUNNING", ""),
        ("NODE_FAIL", ""),
        ("PREEMPTED", ""),
        ("TIMEOUT", ""),
        ("", ""),  # nobody can tell
    ],
)
def test_only_a_cancelled_job_ends_the_run(
    state: str, cancelled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [PartEnd("CANCELLED", "20001")] if state == "CANCELLED" else []
    monkeypatch.setattr(commands, "job_fields", lambda _: {"JobState": state, "Restarts": "0"} if state else {})
    monkeypatch.setattr(commands, "accounted_ends", lambda _: ends)
    assert state_of(tmp_path, "7") == OwnerState(state or "UNKNOWN", cancelled)


def test_a_job_that_a_survivor_closed_is_no_users_wish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "job_fields", lambda _: {"JobState": "CANCELLED", "Restarts": "0"})
    monkeypatch.setattr(commands, "accounted_ends", lambda _: [])
    (tmp_path / "links").mkdir()
    handover.leave(tmp_path, "7", "n2", "batch host lost", carries_on=True)
    assert state_of(tmp_path, "7") == OwnerState("CANCELLED")
    assert state_of(tmp_path, "8").cancelled == "job 8 was cancelled"


def test_a_new_leader_is_a_reason_to_ask_at_once() -> None:
    answers = [OwnerState("RUNNING"), OwnerState("CANCELLED", "job 7 was cancelled")]
    asked = threading.Semaphore(0)

    def ask() -> OwnerState:
        asked.release()
        return answers.pop(0)

    watch = OwnerWatch(ask, interval_s=1e6, least_s=0.0)
    watch.start()
    assert asked.acquire(timeout=PATIENCE_S)
    watch.look_now()
    watch._thread.join(PATIENCE_S)
    assert (watch.cancelled, answers) == ("job 7 was cancelled", [])


def test_a_job_that_slurm_is_ending_is_asked_for_again_soon() -> None:
    answers = [OwnerState("COMPLETING"), OwnerState("COMPLETING"), OwnerState("CANCELLED", "so it was")]
    watch = OwnerWatch(lambda: answers.pop(0), interval_s=1e6, completing_s=0.0, least_s=0.0)
    watch.start()
    watch._thread.join(PATIENCE_S)
    assert watch.cancelled == "so it was"


def test_a_watch_that_is_closed_asks_no_more() -> None:
    watch = OwnerWatch(lambda: OwnerState("RUNNING"), interval_s=1e6)
    watch.start()
    watch.close()
    watch._thread.join(PATIENCE_S)
    assert not watch._thread.is_alive() and not watch.cancelled


@pytest.mark.parametrize(
    ("newest", "before", "written"), [("7", None, True), ("9", None, False), ("7", "failed", False)]
)
def test_the_verdict_is_written_once_and_for_no_run_that_was_begun_anew(
    newest: str, before: str | None, written: bool, tmp_path: Path
) -> None:
    run_directory.open_run(tmp_path)
    assert run_claim.take(tmp_path, run_claim.Turn(1, newest, newest, 1, ("n1",), -1, 0.0))
    if before is not None:
        run_directory.write_verdict(tmp_path, "7", {"verdict": before})
    joiner = Joiner.__new__(Joiner)
    joiner.path = tmp_path
    joiner._end_the_run("7", "job 7 was cancelled")
    found = run_directory.read_verdict(tmp_path, "7")
    assert (found is not None and found["verdict"] == "cancelled") is written
    assert (run_directory.read_verdict(tmp_path) or {}).get("verdict") == ("cancelled" if written else before)
