"""What submitit's users do with any executor, done with ours on this machine: many jobs at once, most of them at work
while others end. One launch in the quick suite: test_submitit_parameters."""

from __future__ import annotations

import asyncio
import functools
import operator
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import submitit
from submitit.core import utils
from submitit.helpers import Checkpointable, CommandFunction

from tests.support.waiting import until

pytestmark = pytest.mark.slow
ODD = "a b'\"\nc"


def executor(folder: Path, **parameters: Any) -> submitit.AutoExecutor:
    made = submitit.AutoExecutor(folder=folder, cluster="resilio", resilio_cluster="local", resilio_max_num_timeout=1)
    made.update_parameters(nodes=1, timeout_min=5, resilio_launch_flags=["--max-restarts", "0"], **parameters)
    return made


@pytest.fixture(autouse=True)
def ours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "RESILIO_")):
            monkeypatch.delenv(name)


def by_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """As functions of a notebook are pickled: the ranks need not find this module."""
    function.__module__ = "__main__"
    return function


@by_value
def rank_speaks(factor: int) -> tuple[int, int, str]:
    env = submitit.JobEnvironment()
    print("hello from", env.global_rank)
    print("bye from", env.global_rank, file=sys.stderr)
    return factor * env.global_rank, env.num_tasks, env.job_id


@by_value
def rank_one_fails() -> None:
    if submitit.JobEnvironment().global_rank == 1:
        raise RuntimeError("failed on purpose")
    time.sleep(3600)


class Slacker(Checkpointable):
    """Works when it is told to end."""

    def __call__(self, ready: Path, slack: bool = True) -> str:
        ready.touch()
        while slack:
            time.sleep(0.05)
        return "worked"

    def checkpoint(self, ready: Path, slack: bool = True) -> submitit.helpers.DelayedSubmission:
        return submitit.helpers.DelayedSubmission(self, ready, slack=False)


Slacker.__module__ = "__main__"


def test_results_errors_and_logs_of_many_jobs_at_once(tmp_path: Path) -> None:
    two = executor(tmp_path / "%j" / ODD, tasks_per_node=2)
    tasks, failing = two.submit(rank_speaks, 3), two.submit(rank_one_fails)
    one = executor(tmp_path / "one")
    with one.batch():
        with pytest.raises(RuntimeError, match="not allowed"):
            one.update_parameters(nodes=1)
        batched = one.submit(operator.add, 40, 2)
        with pytest.raises(AttributeError, match="forbidden"):
            _ = batched.job_id
    mapped = one.map_array(operator.mul, [1, 2], [10, 20])
    arrayed = one.submit_array([functools.partial(operator.sub, 9, 4)])
    command = one.submit(CommandFunction(["echo", ODD]))
    broken = executor(tmp_path / "broken", resilio_setup=["echo nothing is here >&2", "false"]).submit(abs, -1)

    assert tasks.results() == [(0, 2, tasks.job_id), (3, 2, tasks.job_id)]
    assert tasks.task(1).result()[0] == 3 and tasks.exception() is None and tasks.done() and tasks.num_tasks == 2
    with pytest.raises(ValueError, match="between 0 and 1"):
        tasks.task(2)
    own, whole = tasks.task(1).stdout() or "", tasks.stdout() or ""
    assert "hello from 1\n" in own and "bye from 1\n" in own and "from 0" not in own  # both streams, by rank
    assert "[rank 0] hello from 0\n" in whole and "round 0: 2 ranks" in (tasks.stderr() or "")
    error = failing.exception()
    assert isinstance(error, utils.FailedJobError | utils.UncompletedJobError)
    assert "failed on purpose" in str(failing.task(1).exception()) and failing.state == "FAILED"
    assert batched.result() == 42 and batched.task(0) is batched
    assert [job.result() for job in (*mapped, *arrayed)] == [10, 40, 5]
    assert asyncio.run(mapped[0].awaitable().result()) == 10
    assert command.result() == ODD
    again = type(batched)(tmp_path / "one", batched.job_id)
    assert (again.submission().function, again.submission().args, again.result()) == (operator.add, (40, 2), 42)
    assert "nothing is here" in str(broken.exception()) and broken.state == "FAILED"


def test_jobs_that_are_cancelled_killed_or_told_to_end(tmp_path: Path) -> None:
    made = executor(tmp_path / "jobs")
    at_once = made.submit(time.sleep, 3600)
    at_once.cancel()
    cancelled, killed, saved = (made.submit(Slacker(), tmp_path / name) for name in ("c", "k", "s"))
    for name, job in (("c", cancelled), ("k", killed), ("s", saved)):
        until((tmp_path / name).exists, f"the start of {name}", lambda job=job: job.stderr())
    cancelled.cancel()
    killed._process.kill()  # type: ignore[attr-defined]
    saved._interrupt()  # type: ignore[attr-defined]
    for job, state in ((at_once, "CANCELLED"), (cancelled, "CANCELLED"), (killed, "INTERRUPTED"), (saved, "CANCELLED")):
        until(job.done, f"the end of a job that is {state}", job.stderr)
        assert job.state == state, job.stderr()
        with pytest.raises(utils.UncompletedJobError):
            job.result()
    assert saved.submission().kwargs == {"slack": False}  # the next one goes on from there
