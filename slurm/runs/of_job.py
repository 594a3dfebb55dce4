"""The run directories of a job, from what Slurm tells of the job and of those that its chain has submitted after it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.core.errors import CommandError
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.orders import check_job
from resilio_hpc.slurm.client.runner import run_here

RUNS = "resilio-runs"  # where a launch makes its run's directory, in its working directory
_SCRIPT = re.compile(r"(/.*)/batch-(\d+)\.sh(?: |$)")


@dataclass(frozen=True)
class JobsRuns:
    """Directories that may be the run of a job, the likeliest first. ``known``: Slurm knows the job."""

    known: bool
    directories: tuple[Path, ...] = ()


def of_job(word: str) -> JobsRuns:
    """Ask Slurm for the runs of a job, in bounded time. Raises UsageError for what is no job's number."""
    job = check_job(word)
    fields = commands.job_fields(job)
    found = [run_of(fields.get("Command", ""))]
    if fields.get("WorkDir"):
        work = Path(fields["WorkDir"])
        numbers = dict.fromkeys((job, fields.get("JobId", job)))
        found += [str(work / RUNS / number) for number in numbers]
        found.append(str(work))  # a joiner works in the directory of its run
    found += _of_successors(job)
    return JobsRuns(bool(fields), tuple(Path(directory) for directory in dict.fromkeys(found) if directory))


def run_of(command: str, job: str = "") -> str:
    """Return the run whose chain submitted a job with this Command (as the one after ``job``); "" for others. Pure."""
    found = _SCRIPT.match(command)
    return found[1] if found and job in ("", found[2]) else ""


def _of_successors(job: str) -> list[str]:
    """Return the runs whose chains have submitted a job after this one; none where Slurm does not answer."""
    try:
        argv = ["squeue", "-a", "-h", "-t", "all", "-u", str(os.geteuid()), "-o", "%o"]
        text = run_here(argv, commands.TIMEOUT_S).stdout
    except CommandError:
        return []
    return [directory for line in text.splitlines() if (directory := run_of(line, job))]
