"""When a job of a chain is over, what its state and its failure are; Slurm's answers by a fake of squeue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from submitit.core import utils

from resilio_hpc.slurm.submit.submitit_job import ChainWatcher, ResilioJob

FAKE_SQUEUE = """#!/bin/bash
# A fake of squeue: answers what its file says to the one question that it knows.
[ "$*" = "-h -r -t all -j $(cat "$0.jobs") -o %i|%T|%N" ] || { echo "fake squeue: unknown question $*" >&2; exit 64; }
cat "$0.answer"
"""


class Job(ResilioJob[Any]):
    """A job that no other process asks Slurm about; a result that is not there is not waited for."""

    watcher = ChainWatcher(delay_s=60)
    _results_timeout_s = 0


class Chain:
    """A job with two links in a folder, and Slurm's word on them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        Job.watcher.clear()
        (folder / "bin").mkdir()
        self._squeue = folder / "bin" / "squeue"
        self._squeue.write_text(FAKE_SQUEUE)
        self._squeue.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
        (folder / "bin" / "sacct").write_text("#!/bin/bash\necho 'Slurm accounting storage is disabled' >&2; exit 1\n")
        (folder / "bin" / "sacct").chmod(0o755)
        self.run = folder / "jobs" / "7_run"
        self.run.mkdir(parents=True)
        links = [{"number": 1, "job": "7"}, {"number": 2, "job": "8"}]
        (self.run / "chain.json").write_text(json.dumps({"v": 1, "links": links}))
        self.job = Job(folder / "jobs", "7")

    def slurm_says(self, **states: str) -> None:
        self._squeue.with_name("squeue.jobs").write_text("7,8")
        lines = [f"{name.removeprefix('job')}|{state}|n1\n" for name, state in states.items()]
        self._squeue.with_name("squeue.answer").write_text("".join(lines))

    def verdict(self, verdict: str, **more: object) -> None:
        (self.run / "verdict.json").write_text(json.dumps({"verdict": verdict, "reason": "a reason", **more}))

    def result(self, outcome: str, value: object) -> None:
        utils.cloudpickle_dump((outcome, value), self.job.paths.result_pickle)


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chain:
    return Chain(tmp_path, monkeypatch)


def test_a_result_alone_is_no_end(chain: Chain) -> None:
    chain.slurm_says(job7="RUNNING", job8="PENDING")
    chain.result("success", 1)
    assert (chain.job.done(force_check=True), chain.job.state) == (False, "RUNNING")
    chain.verdict("time_limit")
    chain.slurm_says(job7="COMPLETED", job8="RUNNING")
    assert (chain.job.done(force_check=True), chain.job.state) == (False, "RUNNING")
    chain.verdict("completed")
    assert (chain.job.done(), chain.job.state, chain.job.result()) == (True, "COMPLETED", 1)


def test_a_run_that_gave_up_tells_why(chain: Chain) -> None:
    chain.slurm_says(job7="RUNNING", job8="PENDING")
    chain.verdict("no_progress", first_failure={"rank": 3, "node": "n2", "message": "ValueError: x"})
    assert (chain.job.done(), chain.job.state) == (True, "FAILED")
    said = str(chain.job.exception())
    assert "verdict no_progress: a reason; rank 3 on n2: ValueError: x" in said and str(chain.run) in said


def test_an_exception_is_the_functions_own(chain: Chain) -> None:
    chain.verdict("no_progress")
    chain.result("error", "Traceback …\nValueError: y")
    with pytest.raises(utils.FailedJobError, match="ValueError: y"):
        chain.job.result()


def test_jobs_that_slurm_forgot_are_over_only_where_it_says_so(chain: Chain) -> None:
    chain.slurm_says()
    assert (chain.job.done(force_check=True), chain.job.state) == (True, "PURGED")


def test_an_unanswered_question_is_no_end(chain: Chain) -> None:
    chain.slurm_says(job7="RUNNING", job8="PENDING")
    chain._squeue.write_text(
        "#!/bin/bash\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1\n"
    )
    assert (chain.job.done(force_check=True), chain.job.state) == (False, "UNKNOWN")


def test_output_is_the_chains_and_of_a_task_its_lines(chain: Chain) -> None:
    several = Job(chain.run.parent, "7", tasks=(0, 1))
    assert several.stdout() is None
    several.paths.stdout.write_text("[rank 0] a\n[rank 1] b\n[rank 0] c\n")
    assert [several.stdout(), several.task(0).stdout(), several.task(1).stdout()] == [
        "[rank 0] a\n[rank 1] b\n[rank 0] c\n", "a\nc\n", "b\n",
    ]  # fmt: skip


def test_a_job_lives_on_in_a_pickle(chain: Chain) -> None:
    chain.verdict("completed")
    chain.result("success", 5)
    utils.cloudpickle_dump(chain.job, chain.run / "job.pkl")
    again = utils.pickle_load(chain.run / "job.pkl")
    assert (again.result(), again.links()) == (5, ["7", "8"])
