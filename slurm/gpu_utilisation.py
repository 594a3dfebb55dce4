"""How busy a running job's GPUs are, as nvidia-smi on its nodes says."""

from __future__ import annotations

from resilio_hpc.core.errors import CommandError
from resilio_hpc.slurm import commands
from resilio_hpc.slurm.runner import Runner, run_here

_QUERY = ("nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")


def fetch_gpu_utilisation(job: str, run: Runner = run_here) -> float | None:
    """The mean over a job's GPUs now, from 0 to 1; None where it cannot be told.

    A step of one task per node runs beside the job's own (``--overlap``) for a moment. nvidia-smi's number is the share
    of the last second or less in which any kernel ran, so look more than once before you believe it.
    """
    step = ["srun", f"--jobid={job}", "--overlap", "--ntasks-per-node=1", "--mem=0", "--no-kill", "--immediate=10"]
    try:
        return parse_utilisation(run([*step, *_QUERY], commands.TIMEOUT_S, {}).stdout)
    except CommandError:
        return None


def parse_utilisation(text: str) -> float | None:
    """Lines such as ``97`` or ``[N/A]``; None where no line is a number. Pure."""
    found = [int(line) for line in map(str.strip, text.splitlines()) if line.isdecimal() and int(line) <= 100]
    return sum(found) / len(found) / 100 if found else None
