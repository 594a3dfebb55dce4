"""A job whose grace runs waits for Slurm to requeue it, as three of Slurm's series show that; nothing else waits."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from resilio_hpc.devtools.devcluster.spec import SLURM_SERIES
from resilio_hpc.launch.chain.preemption import ANSWER_S, OVERDUE_S, Preemption, Stay, preemption, stay_until_ended
from resilio_hpc.slurm.client.commands import parse_fields
from tests.support.slurm.times import in_unix_seconds

SAMPLES = Path(__file__).parent.parent / "slurm" / "samples"
SERIES = tuple(SLURM_SERIES)
IN_GRACE = {
    "JobState": "RUNNING", "Requeue": "1", "StartTime": "1795277625", "PreemptTime": "1795277627",
    "EndTime": "1795277642",
}  # fmt: skip


def recorded(series: str) -> list[dict[str, str]]:
    """During the grace: requeue mode, requeue mode with --no-requeue, cancel mode."""
    text = in_unix_seconds((SAMPLES / f"scontrol_preempted_{series}.txt").read_text())
    return [parse_fields(line) for line in text.splitlines()]


@pytest.mark.parametrize("series", SERIES)
def test_a_grace_is_seen_as_slurm_shows_it(series: str) -> None:
    requeued, never_requeued, cancelled = recorded(series)
    assert preemption(requeued) == Preemption(15.0)
    assert preemption(never_requeued) is None
    assert preemption(cancelled) == Preemption(15.0)  # looks the same: the site decides when the grace is over


@pytest.mark.parametrize("series", SERIES)
def test_jobs_that_nobody_preempts_have_no_grace(series: str) -> None:
    text = (SAMPLES / f"scontrol_show_jobs_{series}.txt").read_text()
    assert [preemption(parse_fields(line)) for line in text.splitlines() if line.strip()] == [None] * len(
        text.splitlines()
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"JobState": "CANCELLED"},
        {"JobState": "COMPLETING"},  # being requeued already
        {"PreemptTime": "None"},
        {"PreemptTime": "1795277624"},  # of the run before a requeue
        {"Requeue": "0"},
    ],
)
def test_no_grace_runs(fields: dict[str, str]) -> None:
    assert preemption({**IN_GRACE, **fields} if fields else {}) is None


def test_the_wait_ends_with_the_users_cancel_and_with_slurms_word() -> None:
    for state in ("CANCELLED", "COMPLETING", "PENDING"):
        stay = Stay(0.0)
        assert stay.look(0.0, IN_GRACE, told=False)
        assert not stay.look(1.0, {**IN_GRACE, "JobState": state}, told=False)
    stay = Stay(0.0)
    assert stay.look(0.0, IN_GRACE, told=False)
    assert not stay.look(1.0, IN_GRACE, told=True)


def test_the_wait_is_bounded_whatever_slurm_says_or_does_not() -> None:
    silent = Stay(100.0)
    assert silent.look(100.0, {}, told=False)
    assert silent.look(100.0 + ANSWER_S - 1, {}, told=False)
    assert not silent.look(100.0 + ANSWER_S, {}, told=False)
    away = Stay(0.0)  # slurmctld goes away in the middle of the grace
    assert away.look(5.0, IN_GRACE, told=False)
    assert away.look(5.0 + 15.0 + OVERDUE_S - 1, {}, told=False)
    assert not away.look(5.0 + 15.0 + OVERDUE_S, {}, told=False)
    stuck = Stay(0.0)
    assert stuck.look(0.0, IN_GRACE, told=False)
    assert not stuck.look(15.0 + OVERDUE_S, IN_GRACE, told=False)


def test_an_answer_that_comes_late_counts() -> None:
    stay = Stay(0.0)
    assert stay.look(0.0, {}, told=False)
    assert stay.look(20.0, IN_GRACE, told=False)
    assert stay.look(ANSWER_S + 1, {}, told=False)


def test_slurms_signal_ends_the_wait(capfd: pytest.CaptureFixture[str]) -> None:
    times = iter(range(100))
    asked: list[str] = []

    def ask(job: str) -> dict[str, str]:
        asked.append(job)
        return IN_GRACE

    def sleep(seconds: float) -> None:
        if len(asked) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    assert stay_until_ended("7", ask, lambda: float(next(times)), sleep) == 5.0
    assert asked == ["7"] * 3
    assert signal.getsignal(signal.SIGTERM) is before
    assert capfd.readouterr().err.count("job 7 is being preempted, and saved: it stays until Slurm requeues it") == 1


def test_nobody_waits_where_nothing_is_preempted(capfd: pytest.CaptureFixture[str]) -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError("waited")

    assert stay_until_ended("7", lambda _: {**IN_GRACE, "PreemptTime": "None"}, lambda: 1.0, sleep) == 0.0
    assert capfd.readouterr().err == ""
