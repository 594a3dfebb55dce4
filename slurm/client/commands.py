"""Questions and orders to Slurm by its command line. Every command is bounded; UNKNOWN is an answer, not a guess."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.core.errors import CommandError, SlurmError, UsageError
from resilio_hpc.slurm.client.hostlist import told
from resilio_hpc.slurm.client.runner import Runner, run_here
from resilio_hpc.slurm.client.slurm_errors import SubmitLimit, Unanswered, is_away, limit_reached, refused

TIMEOUT_S = 20.0
UNKNOWN = "UNKNOWN"
_FIELD = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9/:_]*)=")
_COMMAND = re.compile(r"(?<=\s)Command=(.*?)\s(?=(?:SubmitLine|WorkDir)=)")  # the script and its arguments: any text
_SUBMIT_LINE = re.compile(r"(?<=\s)SubmitLine=(.*)\s(?=WorkDir=)")  # 26.05 has it; also any text


def address(job: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return how Slurm addresses a job: one task of an array has the number of the whole array. Pure."""
    task = environment.get("SLURM_ARRAY_TASK_ID", "")
    own = job == environment.get("SLURM_JOB_ID") == environment.get("SLURM_ARRAY_JOB_ID")
    return f"{job}_{task}" if own and task.isdecimal() else job


def job_nodes(job: str) -> list[str] | None:
    """Return the nodes that a job holds now (the environment's list goes stale).

    None without an answer that can be read.
    """
    try:
        return told(run_here(["squeue", "-h", "-j", address(job), "-o", "%N"], TIMEOUT_S).stdout)
    except (CommandError, UsageError):
        return None


def job_end_time(job: str) -> float | None:
    """Return when the job's time limit ends it, in Unix seconds; ``math.inf``: never; None when it is not known."""
    try:
        return parse_end(run_here(["squeue", "-h", "-j", address(job), "-o", "%e"], TIMEOUT_S).stdout)
    except CommandError:
        return None


def parse_end(text: str) -> float | None:
    """Return the time that Slurm printed for the runner: Unix seconds, or a word for none, which is ``math.inf``.

    Pure.

    Unreadable text is None, and never taken for "unlimited".
    """
    word = text.strip()
    if word.isascii() and word.isdecimal():
        return float(word)
    return math.inf if word in ("N/A", "NONE", "Unknown", "UNLIMITED") else None


def job_state(job: str) -> str:
    """Return TIMEOUT, NODE_FAIL, CANCELLED, PREEMPTED, FAILED, RUNNING …; UNKNOWN where no source tells.

    scontrol remembers for MinJobAge; after that only the accounting does.
    """
    fields = job_fields(job)
    state = fields.get("JobState", "").split()[0:1]
    if state:
        return state[0]
    ends = accounted_ends(job)
    return ends[-1].state if ends else UNKNOWN


def job_fields(job: str) -> dict[str, str]:
    """Return ``scontrol show job``'s fields; empty when it does not know the job or does not answer."""
    try:
        return parse_fields(run_here(["scontrol", "-o", "show", "job", address(job)], TIMEOUT_S).stdout)
    except CommandError:
        return {}


def parse_fields(text: str) -> dict[str, str]:
    """Return the ``Key=value`` words of scontrol's one-line output; values may hold spaces and equal signs. Pure."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    fields = {}
    for name, pattern in (("Command", _COMMAND), ("SubmitLine", _SUBMIT_LINE)):
        found = pattern.search(line)
        if found:  # a script's arguments may look like fields
            fields[name] = found.group(1).strip()
            line = line[: found.start()] + line[found.end() :]
    matches = list(_FIELD.finditer(line))
    ends = [*(match.start() for match in matches[1:]), len(line)]
    for match, end in zip(matches, ends, strict=False):  # no match, and yet one end
        fields.setdefault(match.group(1), line[match.end() : end].strip())
    return fields


@dataclass(frozen=True)
class Holding:
    """Slurm's view of a job and its nodes: the batch script's node, the nodes it holds now, its state."""

    batch_host: str
    nodes: tuple[str, ...]
    state: str


def holding(job: str) -> Holding | None:
    """Return it; None without a readable answer; state ``UNKNOWN`` when Slurm does not know the job (any more)."""
    try:
        question = ["squeue", "-h", "-t", "all", "-j", address(job), "-o", "%B|%N|%T"]
        text = run_here(question, TIMEOUT_S).stdout.strip()
    except CommandError as error:
        return Holding("", (), UNKNOWN) if "Invalid job id" in str(error) else None
    return parse_holding(text)


def parse_holding(text: str) -> Holding | None:
    """Return the holding of ``n1|n[1-3]|RUNNING``; "" is no job, unreadable text is None. Pure."""
    if not text.strip():
        return Holding("", (), UNKNOWN)
    parts = text.splitlines()[0].split("|")
    if len(parts) != 3 or not parts[2]:
        return None
    try:
        return Holding(parts[0], tuple(told(parts[1])), parts[2])
    except UsageError:
        return None


def node_states(nodes: Sequence[str]) -> dict[str, str] | None:
    """Return Slurm's whole state of nodes, such as ``DOWN+NOT_RESPONDING``; None when Slurm does not answer."""
    try:
        question = ["sinfo", "-a", "-h", "-N", "-n", ",".join(nodes), "-O", "NodeList:|,StateComplete:|"]
        text = run_here(question, TIMEOUT_S).stdout
    except CommandError:
        return None
    return {name: state.upper() for name, state, *_ in (line.split("|") for line in text.splitlines() if "|" in line)}


@dataclass(frozen=True)
class PartEnd:
    """How one run of a job ended; a requeued job has several. ``by``: the user number that cancelled it, or ""."""

    state: str
    by: str = ""


def accounted_ends(job: str) -> list[PartEnd]:
    """Return the ends by accounting, oldest first, the current run last; empty without accounting or an answer."""
    try:
        text = run_here(["sacct", "-n", "-X", "-P", "-D", "-j", address(job), "-o", "State"], TIMEOUT_S).stdout
    except CommandError:
        return []
    return parse_accounted(text)


def parse_accounted(text: str) -> list[PartEnd]:
    """Return the ends of lines such as ``REQUEUED`` or ``CANCELLED by 20001``. Pure."""
    ends = []
    for words in (line.split() for line in text.splitlines() if line.strip()):
        ends.append(PartEnd(words[0].rstrip("+"), words[2] if words[1:2] == ["by"] and len(words) > 2 else ""))
    return ends


def submit_line(job: str) -> str:
    """Return the command line that submitted the job, from accounting; "" without."""
    try:
        return run_here(["sacct", "-n", "-X", "-P", "-j", address(job), "-o", "SubmitLine"], TIMEOUT_S).stdout.strip()
    except CommandError:
        return ""


def requeue(job: str) -> None:
    """End a job's present run and queue it again under its number. Raises SlurmError."""
    _order(["scontrol", "requeue", address(job)])


def release(job: str) -> None:
    """Let a job start that was submitted held. Raises SlurmError."""
    _order(["scontrol", "release", address(job)])


def set_comment(job: str, text: str) -> None:
    """Write a job's Comment, which its user may. Raises SlurmError."""
    _order(["scontrol", "update", f"JobId={address(job)}", f"Comment={text}"])


def cancel(job: str, signal: str | None = None) -> None:
    """Cancel a job, or send a signal to all its steps. Raises SlurmError."""
    _order(["scancel", *(["--signal", signal] if signal else []), address(job)])


def cancel_waiting(job: str) -> None:
    """Cancel a job if it still waits; one that has started is left alone. Raises SlurmError."""
    _order(["scancel", "--state=PENDING", address(job)])


def _order(argv: Sequence[str]) -> None:
    try:
        run_here(argv, TIMEOUT_S)
    except CommandError as error:
        raise refused(error) from error


def submit(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run ``sbatch --parsable ARGUMENTS``; return the job id. Raises SlurmError."""
    try:
        text = run_here(["sbatch", "--parsable", *arguments], TIMEOUT_S, environment=environment).stdout
    except CommandError as error:
        limit = limit_reached(error.stderr)
        raise (SubmitLimit(limit) if limit else refused(error)) from error
    return text.strip().splitlines()[-1].split(";")[0]


def pending_with_script(script: Path) -> str | None:
    """Return the user's pending job that runs ``script``, if there is one. Raises SlurmError."""
    try:
        text = run_here(["squeue", "-a", "-h", "-u", str(os.geteuid()), "-t", "PD", "-o", "%A|%o"], TIMEOUT_S).stdout
    except CommandError as error:
        raise refused(error) from error
    found = [number for number, _, command in (line.partition("|") for line in text.splitlines())
             if command == str(script) or command.startswith(f"{script} ")]  # fmt: skip
    return found[0] if found else None


def batch_script(job: str, target: Path) -> None:
    """Write the job's batch script to ``target``. Raises SlurmError."""
    try:
        target.unlink(missing_ok=True)
        said = run_here(["scontrol", "write", "batch_script", address(job), str(target)], TIMEOUT_S).stderr
    except CommandError as error:
        raise refused(error) from error
    if not target.exists():  # its exit code is always 0
        kind = Unanswered if is_away(said) else SlurmError
        raise kind(f"scontrol write batch_script {job}: {said.strip()}")


def config(run: Runner = run_here) -> dict[str, str]:
    """Return Slurm's configuration as ``scontrol show config`` prints it; empty when Slurm does not answer."""
    try:
        text = run(["scontrol", "show", "config"], TIMEOUT_S, {}).stdout
    except CommandError:
        return {}
    return {key: value.strip() for key, value in re.findall(r"^(\w+)\s*=[ \t]*(.*)$", text, re.MULTILINE)}


_CONFIG_TIME = re.compile(r"Configuration data as of ([0-9]{1,12})(?!\S)")
CLOCKS_AGREE_S = 5.0


def clock_ahead_s(clock: Callable[[], float] = time.time) -> float:
    """Return the seconds by which this host's clock is ahead of slurmctld's; 0 if they agree, or without an answer.

    Slurm ends a job by slurmctld's clock. ``scontrol show config`` prints its time, in whole Unix seconds.
    """
    asked = clock()
    try:
        text = run_here(["scontrol", "show", "config"], TIMEOUT_S).stdout
    except CommandError:
        return 0.0
    return parse_clock_ahead(text, asked, clock())


def parse_clock_ahead(text: str, asked: float, answered: float) -> float:
    """Return the difference by the answer, and this host's clock before and after it. Pure."""
    found = _CONFIG_TIME.search(text)
    if not found:
        return 0.0
    told = float(found[1])
    if asked - told > CLOCKS_AGREE_S:
        return asked - told
    return answered - told if told - answered > CLOCKS_AGREE_S else 0.0


def config_value(name: str) -> str:
    """Return a value of Slurm's configuration; "" when it is not set or Slurm does not answer."""
    return config().get(name, "")


def version() -> str:
    """Return Slurm's exact version, "" when there is none."""
    try:
        return run_here(["sinfo", "-V"], TIMEOUT_S).stdout.split()[-1]
    except (CommandError, IndexError):
        return ""
