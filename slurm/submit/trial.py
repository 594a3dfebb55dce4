"""A job submitted on trial: asked for its start, submitted, looked at, cancelled while it still waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.orders.reshape import state_of, value
from resilio_hpc.slurm.submit import submission
from resilio_hpc.slurm.submit.expected_start import Expected, expected_start


@dataclass(frozen=True)
class SubmitRequest:
    """The input of sbatch: a script on its standard input, words, an environment."""

    script: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True)
class JobLook:
    """A look at a job.

    ``state``: UNKNOWN when Slurm does not answer; ``reason``: why it waits, "" before Slurm looked at it.
    """

    state: str
    reason: str = ""
    nodes: str = ""


class Trials:
    """Trials by Slurm's commands; each ends within its time limit."""

    def expected(self, request: SubmitRequest) -> Expected:
        """Return when it would start. Raises SlurmError: Unanswered where slurmctld is away."""
        return expected_start(request.script, request.arguments, request.environment)

    def submit(self, request: SubmitRequest) -> str:
        """Return the job's number. Raises SlurmError as ``submission.submit``."""
        return submission.submit(request.script, request.arguments, request.environment).job

    def look(self, job: str) -> JobLook:
        """Return the job's state."""
        fields = commands.job_fields(job)
        why = value(fields, "Reason").replace("_", " ")
        return JobLook(state_of(fields), "" if why == "None" else why, value(fields, "NodeList"))

    def take_back(self, job: str) -> None:
        """Cancel it if it still waits. Raises SlurmError."""
        commands.cancel_waiting(job)
