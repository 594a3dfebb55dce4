"""Questions and orders to Slurm through its command line. Every command is bounded; UNKNOWN is an answer, no guess."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from resilio_hpc.core.errors import CommandError, SlurmError
from resilio_hpc.core.process import run
from resilio_hpc.slurm.hostlist import expand

TIMEOUT_S = 20.0
UNKNOWN = "UNKNOWN"
_FIELD = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9/:_]*)=")
_COMMAND = re.compile(r"(?<=\s)Command=(.*?)\s(?=(?:SubmitLine|WorkDir)=)")  # the script and its arguments: any text


def job_nodes(job: str) -> list[str] | None:
    """The nodes that a job holds now (the environment's list goes stale); None when Slurm does not answer."""
    try:
        return expand(run(["squeue", "-h", "-j", job, "-o", "%N"], TIMEOUT_S).stdout.strip())
    except CommandError:
        return None


def job_end_time(job: str) -> float | None:
    """When the job's time limit ends it, in Unix seconds; None when unknown or unlimited."""
    try:
        text = run(["squeue", "-h", "-j", job, "-o", "%e"], TIMEOUT_S).stdout.strip()
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (CommandError, ValueError):
        return None


def job_state(job: str) -> str:
    """TIMEOUT, NODE_FAIL, CANCELLED, PREEMPTED, FAILED, RUNNING …; UNKNOWN when nobody can tell.

    scontrol remembers for MinJobAge; after that only the accounting does.
    """
    fields = job_fields(job)
    state = fields.get("JobState", "").split()[0:1]
    if state:
        return state[0]
    try:
        text = run(["sacct", "-n", "-X", "-P", "-D", "-j", job, "-o", "State"], TIMEOUT_S).stdout.strip()
    except CommandError:
        return UNKNOWN
    return text.splitlines()[-1].split()[0] if text else UNKNOWN


def job_fields(job: str) -> dict[str, str]:
    """``scontrol show job``'s fields; empty when it does not know the job or does not answer."""
    try:
        return parse_fields(run(["scontrol", "-o", "show", "job", job], TIMEOUT_S).stdout)
    except CommandError:
        return {}


def parse_fields(text: str) -> dict[str, str]:
    """``Key=value`` words of scontrol's one-line output; values may hold spaces and equal signs. Pure."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    command = _COMMAND.search(line)
    fields = {"Command": command.group(1).strip()} if command else {}
    line = _COMMAND.sub("", line)  # a script's arguments may look like fields
    matches = list(_FIELD.finditer(line))
    ends = [*(match.start() for match in matches[1:]), len(line)]
    for match, end in zip(matches, ends, strict=False):  # no match, and yet one end
        fields.setdefault(match.group(1), line[match.end() : end].strip())
    return fields


def cancel(job: str, signal: str | None = None) -> None:
    """Cancel a job, or send a signal to all its steps. Raises SlurmError."""
    try:
        run(["scancel", *(["--signal", signal] if signal else []), job], TIMEOUT_S)
    except CommandError as error:
        raise SlurmError(str(error)) from error


def submit(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """``sbatch --parsable ARGUMENTS``; returns the job id. Raises SlurmError."""
    try:
        text = run(["sbatch", "--parsable", *arguments], TIMEOUT_S, env=environment).stdout
    except CommandError as error:
        raise SlurmError(str(error)) from error
    return text.strip().splitlines()[-1].split(";")[0]


def batch_script(job: str, target: Path) -> None:
    """Write the job's batch script to ``target``. Raises SlurmError."""
    try:
        target.unlink(missing_ok=True)
        run(["scontrol", "write", "batch_script", job, str(target)], TIMEOUT_S)
    except CommandError as error:
        raise SlurmError(str(error)) from error


def config_value(name: str) -> str:
    """A value of Slurm's configuration; "" when it is not set or Slurm does not answer."""
    try:
        text = run(["scontrol", "show", "config"], TIMEOUT_S).stdout
    except CommandError:
        return ""
    match = re.search(rf"^{re.escape(name)}\s*=\s*(.*)$", text, re.MULTILINE)
    return match.group(1).strip() if match else ""


def version() -> str:
    """Slurm's exact version, "" when there is none."""
    try:
        return run(["sinfo", "-V"], TIMEOUT_S).stdout.split()[-1]
    except (CommandError, IndexError):
        return ""
