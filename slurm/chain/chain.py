"""Chained jobs: the successor is submitted at the start and waits for this job's end (CARD-5, NVX-5).

A successor submitted at the start survives everything that can happen to this job, loss of the batch host included;
it starts in the second in which this one ends, and is cancelled when the run completes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from resilio_hpc.core import trusted_files
from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.errors import SlurmError, Untrusted
from resilio_hpc.core.json_fields import Fields
from resilio_hpc.slurm.chain.successor_options import EMPTY, arguments_unknown, successor_arguments
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.slurm_errors import Unanswered

RUNS = "RESILIO_CHAIN_RUNS"  # what the earlier jobs launched with --chain, and where: JSON of ``KnownRun``s
_JOB = re.compile(r"[0-9]{1,18}(_[0-9]{1,9})?")
REVIVED = "RESILIO_REVIVED"  # set in the environment of a job with which a user continues a chain that had ended


@dataclass(frozen=True)
class Link:
    """One job of a chain. ``number`` counts from 1."""

    number: int
    job: str


@dataclass(frozen=True)
class KnownRun:
    """A launch of an earlier job of the chain.

    ``program``: kind, file or name, arguments; ``job``: the first that ran it.
    """

    program: tuple[str, ...]
    run_dir: str
    job: str

    def is_of(self, program: Sequence[str], job: str) -> bool:
        """Return whether ``job`` runs the same program. Its arguments may hold the number of its own job."""
        return self.program == tuple(program) or _numberless(self.program, self.job) == _numberless(program, job)

    def is_of_file(self, program: Sequence[str]) -> bool:
        """Return whether a program is of the same kind and file name, whatever its arguments."""
        return [self.program[0], *map(os.path.basename, self.program[1:2])] == [
            program[0], *map(os.path.basename, program[1:2])
        ]  # fmt: skip


def _numberless(program: Sequence[str], job: str) -> tuple[str, ...]:
    return tuple(re.sub(rf"(?<!\d){re.escape(job)}(?!\d)", "{job}", word) if job else word for word in program)


def known_runs(environment: Mapping[str, str]) -> tuple[KnownRun, ...]:
    """Return the runs in ``RUNS``; none where it is damaged. Pure."""
    try:
        entries = json.loads(environment.get(RUNS, "[]"))
        return tuple(
            KnownRun(tuple(map(str, entry["program"])), str(entry["run_dir"]), str(entry["job"]))
            for entry in entries
            if entry["program"]
        )
    except (ValueError, KeyError, TypeError):
        return ()


def runs_with(environment: Mapping[str, str], program: Sequence[str], run_path: Path, job: str) -> str:
    """Return ``RUNS`` for the next job: with the run that submits it. Pure."""
    others = [run for run in known_runs(environment) if run.run_dir != str(run_path)]
    known = [run for run in known_runs(environment) if run.run_dir == str(run_path)]
    ours = [KnownRun(tuple(program), str(run_path), job)] if program else known
    return json.dumps([asdict(run) for run in (*others, *ours)])


def read_links(run_path: Path) -> list[Link]:
    """Return the chain so far; empty when there is none or the file is damaged. Raises Untrusted."""
    entries = Fields.of(trusted_files.read_object(run_path / "chain.json")).each("links")
    links = [(entry.whole("number"), entry.text("job")) for entry in entries]
    if not all(number is not None and is_job(job) for number, job in links):
        return []
    return [Link(number, job) for number, job in links if number is not None]


def is_job(text: str) -> bool:
    """Return whether ``text`` is the number of a job, or of a task of an array: ``12``, ``12_3``. Pure."""
    return _JOB.fullmatch(text) is not None


def write_links(run_path: Path, links: list[Link]) -> None:
    """Store the chain."""
    write_atomic(run_path / "chain.json", json.dumps({"v": 1, "links": [asdict(link) for link in links]}).encode())


def link_number(environment: Mapping[str, str]) -> int:
    """Return which job of the chain this is, from 1."""
    text = environment.get("RESILIO_LINK", "1")
    return int(text) if text.isdigit() and int(text) > 0 else 1


def successor_environment(
    environment: Mapping[str, str], run_path: Path, number: int, job: str, program: Sequence[str] = ()
) -> dict[str, str]:
    """Return the next job's environment: the user's own without this job's Slurm variables, and the run to continue.

    Pure.
    """
    ours = ("SLURM_", "SBATCH_", "SRUN_", REVIVED)
    kept = {key: value for key, value in environment.items() if not key.startswith(ours)}
    for name in ("SLURM_CONF", "SBATCH_RESERVATION", "SLURM_CLUSTERS"):
        if name in environment:
            kept[name] = environment[name]
    return kept | {
        "RESILIO_RUN_DIR": str(run_path),
        "RESILIO_LINK": str(number + 1),
        "RESILIO_PREDECESSOR": job,
        RUNS: runs_with(environment, program, run_path, job),
    }


def waiting_successor(links: Sequence[Link], number: int, job: str) -> str | None:
    """Return the next job, if this one has submitted it already (in an earlier run, before Slurm requeued it). Pure.

    Pure.
    """
    known = {link.number: link.job for link in links}
    return known.get(number + 1) if known.get(number) == job else None


def submit_successor(run_path: Path, job: str, nodes: int, program: Sequence[str] = ()) -> Link:
    """Submit the next job of the chain and note it; keep one that waits for this job already.

    ``program``: which of the script's launches continues in ``run_path``. Raises SlurmError: SubmitLimit where
    no more jobs may be in the queue, Unanswered where it may be tried again.
    """
    number = link_number(os.environ)
    links = read_links(run_path)
    waiting = waiting_successor(links, number, job)
    if waiting is not None and commands.job_state(waiting) == "PENDING":
        return Link(number + 1, waiting)
    script = run_path / f"batch-{job}.sh"
    successor = commands.pending_with_script(script) if script.exists() else None  # a submission whose answer was lost
    if successor is None:
        arguments = describe_successor(run_path, job, nodes, program)
        variables = successor_environment(os.environ, run_path, number, job, program)
        successor = _submit(script, arguments, variables)
    link = Link(number + 1, successor)
    write_links(run_path, [*(known for known in links if known.number < number), Link(number, job), link])
    return link


def describe_successor(run_path: Path, job: str, nodes: int, program: Sequence[str] = ()) -> list[str]:
    """Return sbatch's arguments for the job after ``job``; keep them and the batch script in the run directory.

    Raises SlurmError, Untrusted, OSError.
    """
    os.close(trusted_files.open_directory(run_path))
    script = run_path / f"batch-{job}.sh"
    text = _batch_script(job, script)
    fields = job_description(job, text)
    fields["TimeLimit"] = _noted_time_limit(run_path, job) or fields.get("TimeLimit", "")
    arguments = successor_arguments(fields, job, nodes, script, text, sys.argv)
    kept = {"v": 1, "arguments": arguments, "runs": runs_with(os.environ, program, run_path, job)}
    write_atomic(_kept(run_path, job), json.dumps(kept).encode(), mode=0o600)
    return arguments


def _batch_script(job: str, script: Path) -> str:
    """Return the batch script of a job; keep it in ``script``, which its user alone can read, as Slurm does.

    Raises OSError.
    """
    with tempfile.TemporaryDirectory(prefix=".batch-", dir=script.parent) as private:  # of mode 0700
        written = Path(private) / script.name
        commands.batch_script(job, written)
        text = written.read_text(errors="replace")
        written.chmod(0o700)
        written.rename(script)
    return text


def _submit(script: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Submit a job and return its number. Raises SlurmError, Untrusted.

    sbatch reads the script by its path. Users who can rename directories above it could exchange it in that moment. So
    the script that Slurm got is compared with the one that was kept.
    """
    kept = trusted_files.read_text(script)
    job = commands.submit(arguments, environment)
    with contextlib.suppress(SlurmError), tempfile.TemporaryDirectory(prefix="resilio-") as private:
        commands.batch_script(job, Path(private) / "script")
        if (Path(private) / "script").read_text(errors="replace").strip() != kept.strip():
            commands.cancel(job)
            raise Untrusted(f"job {job} had another script than {script}, and is cancelled: who can write above it?")
    return job


def note_time_limit(run_path: Path, job: str, limit: str) -> None:
    """Note a job's own time limit for the next job, before the limit is first shortened. Raises OSError."""
    if not _noted_time_limit(run_path, job):
        write_atomic(run_path / "links" / f"{job}.limit", limit.encode())


def _noted_time_limit(run_path: Path, job: str) -> str:
    try:
        return trusted_files.read_text(run_path / "links" / f"{job}.limit").strip()
    except OSError:
        return ""


def kept_arguments(run_path: Path, job: str) -> list[str] | None:
    """Return what ``describe_successor`` has kept; None where that or the script is missing. Raises Untrusted."""
    arguments = Fields.of(trusted_files.read_object(_kept(run_path, job))).texts("arguments")
    try:
        os.close(trusted_files.open_file(run_path / f"batch-{job}.sh"))
    except OSError:
        return None
    return list(arguments) or None


def _kept(run_path: Path, job: str) -> Path:
    return run_path / f"batch-{job}.json"


def submit_revived(run_path: Path, links: Sequence[Link], model: str, environment: Mapping[str, str]) -> Link:
    """Submit one more job to a chain that has ended, as ``model`` described the job after it.

    It waits for the last one's end, if that is still to come. One that was submitted before, and not noted, is kept. It
    is held until it is noted: a job that starts finds its run by being among the chain's. Raises SlurmError as
    ``submit_successor`` does.
    """
    last = links[-1]
    arguments = kept_arguments(run_path, model)
    if arguments is None:
        raise SlurmError(f"the batch script of job {model} is not kept in {run_path}")
    job = commands.pending_with_script(run_path / f"batch-{model}.sh")
    if job is None:
        ours = [f"--dependency=afterany:{last.job}", "--hold"]
        runs = Fields.of(trusted_files.read_object(_kept(run_path, model))).text("runs")
        variables = successor_environment({**environment, RUNS: runs}, run_path, last.number, last.job) | {REVIVED: "1"}
        arguments = [each for each in arguments if not each.startswith("--dependency=")]
        job = _submit(run_path / f"batch-{model}.sh", [*ours, *arguments], variables)
    link = Link(last.number + 1, job)
    write_links(run_path, [*(known for known in links if known.job != job), link])
    commands.release(job)
    return link


def job_description(job: str, text: str) -> dict[str, str]:
    """Return ``scontrol show job``'s fields, with the submit line from accounting where only that has it."""
    fields = commands.job_fields(job)
    if not fields:  # without them the next job would differ from this one
        raise Unanswered(f"scontrol show job {job}: no answer")
    if fields.get("SubmitLine", "") in EMPTY:
        fields["SubmitLine"] = commands.submit_line(job)
    if arguments_unknown(fields, text):
        print(
            f"[resilio] warning: this Slurm does not tell the arguments of job {job}'s batch script: the next job of "
            "the chain gets none (write them into the script, or name them in variables)",
            file=sys.stderr,
        )  # fmt: skip
    return fields


def waits_without_aging(config: Mapping[str, str]) -> bool:
    """Return whether a job gains no priority by age while it waits for another (slurm.conf, PriorityFlags). Pure."""
    weight = config.get("PriorityWeightAge", "0")
    by_age = config.get("PriorityType", "").endswith("multifactor") and weight not in ("", "0")
    return by_age and "ACCRUE_ALWAYS" not in config.get("PriorityFlags", "").upper()
