"""The start that Slurm expects for a job: ``sbatch --test-only``, which submits nothing.

The answer is on standard error (22.05: ``sbatch: Job 8 to start at TIME using 16 processors on nodes n[1-2] in
partition main``; 26.05 has a stray letter behind TIME), a refusal is ``allocation failure: WHY`` with exit code 1. It
counts running jobs only, neither waiting ones nor most limits: such a start is an estimate.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from resilio_hpc.core.errors import CommandError, SlurmError
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.hostlist import told
from resilio_hpc.slurm.client.runner import READING, run_here
from resilio_hpc.slurm.client.slurm_errors import Unanswered, refused, sbatch_reason

_START = re.compile(r"Job \S+ to start at (\S+)(?: \S+)? using \d+ \S+ on nodes (\S+)(?: in partition (\S+))?")
_FAILURE = re.compile(r"^allocation failure: (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Expected:
    """The answer. ``start_s``: Unix seconds, None where Slurm would never start the job; ``why``: its reason."""

    start_s: float | None
    nodes: tuple[str, ...] = ()
    partition: str = ""
    why: str = ""


def expected_start(script: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Expected:
    """Run ``sbatch --test-only ARGUMENTS < script``. Raises SlurmError: Unanswered where slurmctld is away."""
    argv = ["sbatch", "--test-only", *arguments]
    try:
        done = run_here(argv, commands.TIMEOUT_S, READING, environment=environment, stdin=script)
        return parse_start(done.stderr)
    except CommandError as error:
        if error.returncode is None and "cannot start" in str(error):
            raise SlurmError("there is no sbatch on PATH: submit from a login node of the cluster") from error
        meant = refused(error)
        if error.returncode is None or isinstance(meant, Unanswered):
            raise meant from error
        return Expected(None, why=refusal(error))


def refusal(error: CommandError) -> str:
    """Return the reason of a failed test, in one line. Pure."""
    lines = [_FAILURE.sub(r"\1", line) for line in sbatch_reason(error).split("; ")]
    return "; ".join(dict.fromkeys(line.strip() for line in lines))


def parse_start(text: str) -> Expected:
    """Return the start in the last line that has one.

    Raises SlurmError where there is none. Pure, except for a local time's zone.
    """
    found = list(_START.finditer(text))
    if not found:
        raise SlurmError(f"sbatch --test-only told no start: {text.strip()[:200]!r}")
    moment, nodes, partition = found[-1].groups()
    return Expected(_unix(moment), tuple(told(nodes)), partition or "")


def _unix(moment: str) -> float:
    if moment.isdecimal():
        return float(moment)
    try:
        return time.mktime(time.strptime(moment, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        raise SlurmError(f"sbatch --test-only: {moment!r} is no time") from None
