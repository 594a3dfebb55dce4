"""Passes a batch script to sbatch on its standard input: no file is left, and none can be exchanged in between."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.core.errors import CommandError, SlurmError
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.runner import run_here
from resilio_hpc.slurm.client.slurm_errors import (
    SubmitLimit,
    Unanswered,
    Unreachable,
    limit_reached,
    refused,
    sbatch_reason,
)

# Variables of the job in which a user submits another one, which is no part of its run. (LOCAL_NODES: of a rehearsal on
# one machine; with it the new job would play its nodes on its first one.)
_OF_A_RUN = frozenset(
    f"RESILIO_{name}"
    for name in (
        "LINK", "PREDECESSOR", "RUN_ID", "RUN_DIR", "CHECKPOINT_DIR", "AGENT_SOCKET", "ROUND", "EPOCH", "ARENA_DIR",
        "RESTORE", "LOCAL_RANK", "TP", "PP", "DP", "LOCAL_NODES", "SUBMITIT_JOB", "EXCLUDED",
        "PROCESS_OF",
    )
)  # fmt: skip
_OF_SLURM = ("SLURM_CONF", "SLURM_CLUSTERS")


@dataclass(frozen=True)
class Submitted:
    """A submitted job. ``said``: sbatch's text beside the number, for instance a site's notes."""

    job: str
    said: str


def own_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a new job may inherit: nothing of the job, the step or the run in which it is submitted. Pure."""
    inside = "SLURM_JOB_ID" in environment
    return {
        name: value
        for name, value in environment.items()
        if name not in _OF_A_RUN and not (inside and name.startswith("SLURM_") and name not in _OF_SLURM)
    }


def launcher_directory(environment: Mapping[str, str]) -> str:
    """Return the directory of this package's resilio-launch, if PATH does not lead a job to it; else ""."""
    ours = Path(sys.executable).parent
    found = shutil.which("resilio-launch", path=environment.get("PATH"))
    if not (ours / "resilio-launch").exists() or (found and Path(found).parent.resolve() == ours.resolve()):
        return ""
    return str(ours)


def submit(script: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Submitted:
    """Run ``sbatch --parsable ARGUMENTS < script``.

    Raises SlurmError: Unanswered where it is unknown whether the job was submitted, SubmitLimit.
    """
    argv = ["sbatch", "--parsable", *arguments]
    try:
        done = run_here(argv, commands.TIMEOUT_S, environment=environment, stdin=script)
    except CommandError as error:
        why = limit_reached(error.stderr)
        if why:
            raise SubmitLimit(f"sbatch: {why}") from error
        meant = refused(error)
        if isinstance(meant, Unreachable):
            raise SlurmError(f"{meant}: submit from a login node of the cluster") from error
        if isinstance(meant, Unanswered):
            raise Unanswered(
                f"{meant}; whether the job was submitted is not known: look with squeue --me before you try again"
            ) from error
        raise SlurmError(f"sbatch refused the job: {sbatch_reason(error)}") from error
    return Submitted(parse_job(done.stdout), done.stderr.strip())


def parse_job(text: str) -> str:
    """Return the number in ``123`` or ``123;cluster``, the last line. Raises SlurmError. Pure."""
    last = (text.strip().splitlines() or [""])[-1].split(";")[0].strip()
    if not last.isdecimal():
        raise SlurmError(f"sbatch answered {text.strip()!r}, which is no job number: look with squeue --me")
    return last
