"""What a command of Slurm that failed means, by its texts."""

from __future__ import annotations

import pytest

from resilio_hpc.core.errors import CommandError
from resilio_hpc.slurm.client.slurm_errors import JobEnds, Unanswered, Unreachable, limit_reached, refused

REFUSALS = {  # from 22.05.8, 24.11.5 and 26.05.5
    "AssocMaxSubmitJobLimit": "sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: Job "
    "violates accounting/QOS policy (job submit limit, user's size and/or time limits)\n",
    "AssocGrpSubmitJobsLimit": "sbatch: error: AssocGrpSubmitJobsLimit\nsbatch: error: Batch job submission failed",
    "QOSMaxSubmitJobPerUserLimit": "sbatch: error: QOSMaxSubmitJobPerUserLimit\n",
    "QOSGrpSubmitJobsLimit": "sbatch: error: QOSGrpSubmitJobsLimit\n",
    "MaxSubmitJobsPerAccount": "sbatch: error: MaxSubmitJobsPerAccount\nsbatch: error: Batch job submission failed: …",
    "Slurm temporarily unable to accept job": "sbatch: error: Slurm temporarily unable to accept job, sleeping …",
    "Slurm job queue full": "sbatch: error: Slurm job queue full, sleeping and retrying",  # 26.05, MaxJobCount
    "": "sbatch: error: Batch job submission failed: Requested node configuration is not available",
}


@pytest.mark.parametrize("limit", REFUSALS)
def test_a_limit_on_submitted_jobs_is_told_from_other_refusals(limit: str) -> None:
    assert limit_reached(REFUSALS[limit]) == limit


@pytest.mark.parametrize(
    "stderr",
    [
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
        "scancel: error: Kill job error on job id 1: Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
    ],
)
def test_no_answer_is_no_refusal(stderr: str) -> None:
    assert isinstance(refused(CommandError(["sbatch"], 1, "", stderr)), Unanswered)


def test_a_timeout_is_no_refusal_and_a_refusal_no_timeout() -> None:
    late = CommandError(["sbatch"], None, why="no answer within 20 s")
    assert isinstance(refused(late), Unanswered)
    invalid = "sbatch: error: Batch job submission failed: Invalid account or account/partition"
    assert not isinstance(refused(CommandError(["sbatch"], 1, "", invalid)), Unanswered)


@pytest.mark.parametrize(
    "error",
    [
        CommandError(["sbatch"], None, why="cannot start (No such file or directory)"),
        CommandError(["sinfo"], 1, "", "sinfo: fatal: Could not establish a configuration source\n"),
        CommandError(["sinfo"], 1, "", "sinfo: fatal: Unable to process configuration file\n"),
    ],
)
def test_where_there_is_no_slurm_it_is_said(error: CommandError) -> None:
    meant = refused(error)
    assert isinstance(meant, Unreachable)
    assert str(meant).startswith("Slurm cannot be reached from here: s")


@pytest.mark.parametrize("said", ["Job/step already completing or completed", "Invalid job id specified"])
def test_an_order_to_a_job_that_ends_is_no_failure_of_slurms(said: str) -> None:
    error = CommandError(["scancel"], 1, "", f"scancel: error: Kill job error on job id 7: {said}")
    assert isinstance(refused(error), JobEnds)
