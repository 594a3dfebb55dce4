"""Which run directory a launch gets: only the launch that a run belongs to continues it.

A batch script may launch several programs, one after the other or at once, and a chain's next job runs the same script
again. So a launch with ``--chain`` continues the directory in which the same program ran in the job before. A launch
without ``--run-dir`` takes the job's directory, ``resilio-runs/JOB``, if that is free or holds a run of the same
program, else ``JOB-2``, ``JOB-3`` and so on. ``--run-dir`` is used as given.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from msgspec import Struct

from resilio_hpc.core.durable import create_exclusive
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import Fields
from resilio_hpc.core.trusted_files import read_object
from resilio_hpc.launch.chain import step_tasks
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.rundir import holder, run_claim, run_directory
from resilio_hpc.slurm.chain import chain
from resilio_hpc.slurm.client.allocation import detect

MEETING_S = 120.0  # time for the first task of an srun step to choose
MANY = 10_000


class LaunchRequest(Struct, frozen=True):
    """A launch before its directory is chosen. ``given``: ``--run-dir`` names ``options.run_dir``."""

    options: LaunchOptions
    given: bool
    environment: Mapping[str, str]

    @property
    def part(self) -> str:
        """Return this run of the Slurm job, or ""."""
        return holder.slurm_part(self.environment)


def choose(command: LaunchRequest, create: bool = True) -> LaunchOptions:
    """Return the options with the launch's directory, which exists then (not with ``create`` False).

    Raises UsageError where another task of the step does not choose in time, or the directory cannot be used.
    """
    options = command.options
    allocation = None if options.standalone or options.local_nodes else detect(command.environment)
    if allocation is not None and allocation.in_step and allocation.local_task > 0:
        return options  # one launch per node is enough, so this one ends
    together = allocation is not None and allocation.in_step and len(allocation.nodes) > 1 and create
    meeting = _meeting(command) if together else None
    if meeting is not None and allocation is not None and allocation.task > 0:
        return _as_the_first_task(options, meeting)
    try:
        path = _directory(command, create)
    except UsageError:
        _tell(meeting, {"refused": True})
        raise
    chosen = replace(options, run_dir=str(path), launch=_launches(path, command.part) + 1)
    _tell(meeting, {"run_dir": chosen.run_dir, "launch": chosen.launch})
    return chosen


def note_visit(path: Path, environment: Mapping[str, str]) -> None:
    """Note that a launch found the run complete, so that another launch of this job gets its own. Raises OSError."""
    part = holder.slurm_part(environment)
    if part:
        seen = {"v": 1, "verdict": "completed", "exit_code": 0, "reason": "complete before this job"}
        create_exclusive(path / "links" / f"{part}.json", json.dumps(seen).encode(), 0o644)


# -- which one ---------------------------------------------------------------------------------------------------------


def _directory(command: LaunchRequest, create: bool) -> Path:
    continued = continued_run(command)
    if continued is not None:
        return continued
    path = Path(command.options.run_dir)
    if not command.given and command.part:
        return _first_free(path, command, create)
    if _complete(path) and (others := _other_program(path, command)):
        raise UsageError(
            f"{path} holds the complete run of {others}, and this is {_words(command.options.program)}: "
            "give it another --run-dir"
        )
    return path


def continued_run(command: LaunchRequest) -> Path | None:
    """Return the run of the same program in the job before, in a chain's next job; None for any other launch."""
    environment, directory = command.environment, command.environment.get("RESILIO_RUN_DIR", "")
    if not command.options.chain or not directory or "RESILIO_PREDECESSOR" not in environment:
        return None
    path = Path(directory)
    job = environment.get("SLURM_JOB_ID", "")
    if job not in [link.job for link in chain.read_links(path)]:
        return None
    runs = chain.known_runs(environment)
    for run in runs:
        if run.is_of(command.options.program, job):
            return Path(run.run_dir)
    handed = [run for run in runs if run.run_dir == directory]
    if not handed:
        return path  # an older version has submitted this job
    # Its arguments may change from job to job. Another program of the same file may be the script's next stage.
    same_file = any(run.is_of_file(command.options.program) for run in handed)
    return path if same_file and not _complete(path) and not _had_by(path, command.part) else None


def _first_free(base: Path, command: LaunchRequest, create: bool) -> Path:
    for number in itertools.count(1):
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        there = read_object(path / "run.json")
        if there is None and not create:
            return path
        if there is None:
            run_directory.open_run(path, program=command.options.program)
            there = read_object(path / "run.json") or {}
        ours = Fields.of(there).texts("program") in ((), command.options.program)
        if ours and not (_had_by(path, command.part) and (_complete(path) or _lives(path))):
            return path
    raise AssertionError("unreachable")


def _had_by(path: Path, part: str) -> bool:
    """Return whether another launch of this run of the job has, or had, the directory."""
    visited = bool(part) and (run_directory.read_verdict(path, part) or {}).get("verdict") == "completed"
    return visited or _launches(path, part) > 0


def _launches(path: Path, part: str) -> int:
    return sum(turn.holder.within == part for turn in _turns(path, MANY)) if part else 0


def _lives(path: Path) -> bool:
    """Return whether the launch with the newest turn may still run, so that this one is another."""
    newest = next(iter(_turns(path, 1)), None)
    if newest is None or run_directory.read_verdict(path, newest.part) is not None:
        return False
    return holder.lives(newest.holder, holder.kernel_here()) is not False


def _turns(path: Path, count: int) -> list[run_claim.Turn]:
    try:
        return run_claim.newest(path, count)
    except FileNotFoundError:
        return []


def _complete(path: Path) -> bool:
    return (run_directory.read_verdict(path) or {}).get("verdict") == "completed"


def _other_program(path: Path, command: LaunchRequest) -> str:
    """Return what the run's newest launch ran, as text; "" where it is the same, or unknown."""
    options = Fields.of(read_object(path / "launch.json")).inner("options")
    ran = (options.text("kind"), options.text("script"), *options.texts("script_args"))
    return _words(ran) if ran[1] and ran != command.options.program else ""


def _words(program: tuple[str, ...]) -> str:
    text = " ".join(program[1:])
    return text if len(text) <= 80 else f"{text[:79]}…"


# -- the tasks of one srun step ----------------------------------------------------------------------------------------


def _meeting(command: LaunchRequest) -> Path:
    """Return a file whose name all tasks know, whatever the first one chooses."""
    environment = command.environment
    handed = environment.get("RESILIO_RUN_DIR", "") if "RESILIO_PREDECESSOR" in environment else ""
    base = Path(handed if handed and command.options.chain else command.options.run_dir)
    return base / "links" / f"{command.part}.step{environment.get('SLURM_STEP_ID', '')}.json"


def _tell(meeting: Path | None, news: dict[str, object]) -> None:
    if meeting is not None:
        _make(meeting.parent)
        step_tasks.tell(meeting, news)


def _as_the_first_task(options: LaunchOptions, meeting: Path) -> LaunchOptions:
    _make(meeting.parent)
    try:
        chosen = Fields.of(step_tasks.hear(meeting, MEETING_S))
    except OSError as error:
        raise UsageError(f"cannot use the run directory {meeting.parent.parent}: {error.strerror}") from None
    if chosen.data.get("refused"):
        raise SystemExit(2)  # the error is printed already
    if not chosen.text("run_dir"):
        raise UsageError("the first task of this step has not begun: see its error, or start it on every node")
    return replace(options, run_dir=chosen.text("run_dir"), launch=chosen.whole("launch") or 1)


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot use {directory}: {error.strerror}; choose another directory with --run-dir") from None
