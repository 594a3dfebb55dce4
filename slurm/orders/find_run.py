"""The run directory of a job, from what Slurm tells of the job and of those that the chain has submitted after it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from resilio_hpc.core import trusted_files
from resilio_hpc.core.errors import CommandError, UsageError
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.orders import check_job
from resilio_hpc.slurm.client.runner import run_here

_SCRIPT = re.compile(r"(/.*)/batch-(\d+)\.sh(?: |$)")


def run_directory_of(word: str) -> Path:
    """Return a run directory unchanged, or that of a job's number. Raises UsageError, Untrusted, SlurmError."""
    path = Path(word)
    if not word.isdecimal() or path.is_dir():
        if not (path / "run.json").exists():
            raise UsageError(f"{word} is no run directory (it has no run.json): name the one that resilio-launch names")
        return trusted_files.run_directory(path)
    job = check_job(word)
    fields = commands.job_fields(job)
    found = [run_of(fields.get("Command", ""))]
    if fields.get("WorkDir"):
        found.append(str(Path(fields["WorkDir"]) / "resilio-runs" / job))
    for directory in [*found, *_of_successors(job)]:
        if directory and (Path(directory) / "run.json").exists():
            return trusted_files.run_directory(Path(directory))
    if not fields:
        raise UsageError(f"Slurm does not answer, or knows no job {job} any more: name the run directory instead")
    raise UsageError(f"job {job} does not tell its run directory: name the directory instead")


def run_of(command: str, job: str = "") -> str:
    """Return the run whose chain submitted a job with this Command (as the one after ``job``); "" for others. Pure.

    Pure.
    """
    found = _SCRIPT.match(command)
    return found[1] if found and job in ("", found[2]) else ""


def _of_successors(job: str) -> list[str]:
    """Return the runs whose chains have submitted a job after this one. Raises SlurmError."""
    try:
        argv = ["squeue", "-a", "-h", "-t", "all", "-u", str(os.geteuid()), "-o", "%o"]
        text = run_here(argv, commands.TIMEOUT_S).stdout
    except CommandError as error:
        raise commands.refused(error) from error
    return [directory for line in text.splitlines() if (directory := run_of(line, job))]
