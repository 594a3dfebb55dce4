"""The load of a running job's GPUs, by nvidia-smi on its nodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from resilio_hpc.core.errors import CommandError
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.runner import Runner, run_here

_QUERY = ("nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")
NO_ANSWER_S = 600.0  # after a reading without an answer, no other is made for so long
LOOKS = 3


def fetch_gpu_utilisation(job: str, run: Runner = run_here) -> float | None:
    """Return the mean over a job's GPUs now, from 0 to 1; None where it is unknown.

    A step of one task per node runs beside the job's own (``--overlap``) for a moment. nvidia-smi's number is the share
    of the last second or less in which any kernel ran, so one look is not enough: ``GpuLooks``.
    """
    step = ["srun", f"--jobid={job}", "--overlap", "--ntasks-per-node=1", "--mem=0", "--no-kill", "--immediate=10"]
    try:
        return parse_utilisation(run([*step, *_QUERY], commands.TIMEOUT_S, {}).stdout)
    except CommandError:
        return None


def parse_utilisation(text: str) -> float | None:
    """Return the mean of lines such as ``97`` or ``[N/A]``; None where no line is a number. Pure."""
    found = [int(line) for line in map(str.strip, text.splitlines()) if line.isdecimal() and int(line) <= 100]
    return sum(found) / len(found) / 100 if found else None


class GpuLooks:
    """The highest of a job's last readings: a single one may fall into a checkpoint, or between two steps."""

    def __init__(self, again_s: float, fetch: Callable[[str], float | None] = fetch_gpu_utilisation) -> None:
        """Set the interval; ``again_s``: until another reading, each of which is a job step."""
        self._again_s = again_s
        self._fetch = fetch
        self._job = ""
        self._seen: deque[float] = deque(maxlen=LOOKS)
        self._next = float("-inf")

    def busiest(self, job: str, now: float) -> float | None:
        """Return it, with a new reading when it is due. ``now``: monotonic seconds."""
        if job != self._job:
            self._job, self._next = job, float("-inf")
            self._seen.clear()
        if now >= self._next:
            seen = self._fetch(job)
            self._next = now + (NO_ANSWER_S if seen is None else self._again_s)
            if seen is None:
                self._seen.clear()
            else:
                self._seen.append(seen)
        return max(self._seen, default=None)
