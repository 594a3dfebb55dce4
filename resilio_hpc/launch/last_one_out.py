"""Closing the job where nobody else is left to: its batch host, and with it the supervisor, is lost.

Slurm keeps such a job (``--no-kill``) until its time limit, though nothing runs in it any more.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.launch import run_directory
from resilio_hpc.launch.announce import say
from resilio_hpc.launch.chaining import CONTINUES
from resilio_hpc.slurm import chain, commands

# A supervisor that lives has closed the run within FAREWELL_S (supervisor.py), and ended us with it.
SUPERVISOR_DEAD_S = 30.0


def close_job(run_path: Path, part: str) -> None:
    """``part`` names this job's part of the run (``placements.Site.key``): the job's number, and how often requeued.

    Wait until a supervisor would have ended us; then cancel the next job, if it has nothing to do, and this one."""
    time.sleep(SUPERVISOR_DEAD_S)
    verdict = run_directory.read_verdict(run_path, part)
    job = part.partition("r")[0]
    say(f"the batch host of job {job} is lost: the job is closed from here")
    jobs = [link.job for link in chain.read_links(run_path)]
    following = jobs[jobs.index(job) + 1 :] if job in jobs else []
    goes_on = verdict is None or verdict.get("verdict") in (*CONTINUES, "terminated")
    for number in [*([] if goes_on else following), job]:
        try:
            commands.cancel(number)
        except SlurmError as error:
            print(f"[resilio] job {number} could not be cancelled: {error}", file=sys.stderr)
