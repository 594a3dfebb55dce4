"""A controller whose run directory and whose Slurm are both silent gives no leases; a real squeue is not needed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from resilio_hpc.launch.controller.lease_guard import LEASE_S, QUIET_S, LinkGuard, holds_us
from tests.support.waiting import PATIENCE_S


def answers(path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    squeue = path / "squeue"
    squeue.write_text(f"#!/bin/sh\n{body}\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(path), prepend=":")


def ask(guard: LinkGuard, now: float) -> None:
    """Let it ask, and wait for the child's end."""
    guard.tick(now)
    question = guard._question
    assert question is not None
    question.wait(PATIENCE_S)
    guard.tick(now)


def test_the_pulse_alone_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(tmp_path, monkeypatch, "exit 1")
    guard = LinkGuard("7", 0.0, first=True)
    for now in range(0, 600, 10):
        guard.pulse_written(float(now))
        guard.tick(float(now))
        assert guard.may_lead(float(now))
        assert guard._question is None


def test_with_a_hung_directory_slurms_word_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(tmp_path, monkeypatch, 'test "$*" = "-h -j 7 -o %T|%N" && echo "RUNNING|n1"')
    guard = LinkGuard("7", 0.0, first=True)
    now = LEASE_S * 0.6
    while now < 10 * LEASE_S:
        ask(guard, now)
        assert guard.may_lead(now)
        now += LEASE_S * 0.6


@pytest.mark.parametrize("body", ["exit 1", "echo COMPLETING", "echo 'RUNNINGLATE|n1'", "true"])
def test_with_neither_it_leads_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    answers(tmp_path, monkeypatch, body)
    guard = LinkGuard("7", 0.0, first=True)
    ask(guard, LEASE_S * 0.6)
    assert guard.may_lead(LEASE_S - 1)
    assert not guard.changed(LEASE_S - 1)
    assert not guard.may_lead(LEASE_S + 1)
    assert guard.changed(LEASE_S + 1)
    guard.pulse_written(LEASE_S + 2)
    assert guard.changed(LEASE_S + 2)
    assert guard.may_lead(LEASE_S + 2)


@pytest.mark.parametrize(
    ("answer", "job", "node", "holds"),
    [
        ("RUNNING|n[1-3]", "7", "n3", True),
        ("RUNNING|n[1-3]", "7", "n4", False),  # requeued, and running elsewhere; or the node was taken from it
        ("RUNNING|n[1-3]", "9", "n4", True),  # a node of another job that joined
        ("RUNNING|n[1-", "7", "n1", False),
        ("SUSPENDED|n1", "7", "n1", False),
        ("RUNNING|n1\nRUNNING|n2", "7", "n1", False),
    ],
)
def test_slurms_word_counts_where_the_job_runs_here(answer: str, job: str, node: str, holds: bool) -> None:
    assert holds_us(f"{answer}\n", "7", {"SLURM_JOB_ID": job, "SLURMD_NODENAME": node}) is holds


def test_one_that_was_elected_leads_only_once_it_has_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(tmp_path, monkeypatch, "echo 'RUNNING|n1'")
    guard = LinkGuard("7", 0.0, first=False)
    assert not guard.may_lead(0.0)
    assert not guard.changed(1.0), "that is as it should be, for a moment"
    ask(guard, 0.1)
    assert guard.may_lead(1.0)
    assert not guard.changed(1.0)


def test_one_that_was_elected_and_hears_nothing_says_so() -> None:
    guard = LinkGuard("7", 0.0, first=False)
    assert not guard.changed(QUIET_S - 1)
    assert guard.changed(QUIET_S + 1)
    guard.pulse_written(QUIET_S + 2)
    assert guard.changed(QUIET_S + 2)


def test_a_hanging_squeue_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(tmp_path, monkeypatch, "exec sleep 1000")
    guard = LinkGuard("7", 0.0, first=True)
    guard.tick(LEASE_S * 0.6)
    question = guard._question
    assert question is not None
    guard.tick(LEASE_S * 0.6 + 21)
    assert question.returncode == -9
    assert guard._question is None


def test_outside_of_slurm_nobody_is_asked() -> None:
    guard = LinkGuard("", time.monotonic(), first=True)
    guard.tick(1e9)
    assert guard.may_lead(1e9)
