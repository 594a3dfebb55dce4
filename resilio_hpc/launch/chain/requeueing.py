"""A job that requeues itself, since no other job carries its run on."""

from __future__ import annotations

import time

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.launch.process.announce import say
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.slurm_errors import Unanswered

REQUEUE_S = 240.0  # time at the end for slurmctld to come back
REQUEUE_POLL_S = 5.0


def requeue(job: str, poll_s: float) -> None:
    """Requeue a job, as soon as Slurm answers; say so where that fails."""
    deadline = time.monotonic() + REQUEUE_S
    while True:
        try:
            return commands.requeue(job)
        except SlurmError as error:
            if not isinstance(error, Unanswered) or time.monotonic() > deadline:
                say(f"--chain: job {job} could not be requeued: {error}; start the next one by hand")
                return None
        time.sleep(poll_s)
