"""Which run a word names. All commands that take a run ask here.

A word is, in this order: the path of a directory; the name of a run directory, or a whole id; the number of a job; the
beginning of one run's id. Runs are looked for in the places of ``places``, and a job's also with Slurm's help.
"""

from __future__ import annotations

import difflib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from resilio_hpc.core import bounded
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.slurm.chain.chain import is_job
from resilio_hpc.slurm.runs.of_job import RUNS, JobsRuns, of_job
from resilio_hpc.slurm.runs.places import FoundRun, default_places, identify, run_paths

METAVAR = "RUN"
HELP = "the run: its directory, the number of one of its jobs, or its id, of which a unique beginning will do"
MOST_NAMED = 5
SEARCH_S = 20.0  # a file system that hangs does not hold up the command for longer
LIVES_S = 15.0  # a run whose status is younger is under way
_Result = TypeVar("_Result")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")


def run_path(
    word: str, environment: Mapping[str, str] = os.environ, cwd: Path = Path(), ask: Callable[[str], JobsRuns] = of_job
) -> Path:
    """Return the directory of the run that ``word`` names; a path is returned unchanged, whatever is there.

    Raises UsageError, which lists candidates, where the word names no run or more than one.
    """
    if not _NAME.fullmatch(word) or word in (".", "..") or (cwd / word).is_dir():
        return cwd / word
    own = environment.get("RESILIO_RUN_DIR", "")
    here = _in_time(partial(_search, word, [*([Path(own)] if own else []), *default_places(cwd)]), cwd)
    if here.named:
        return _one(here.named, f"{word!r} names {len(here.named)} runs")
    if here.of_job:
        return _one(here.of_job, f"job {word} has {len(here.of_job)} runs")
    told = ask(word) if is_job(word) else JobsRuns(False)
    elsewhere = _in_time(partial(_existing, told.directories), cwd)
    if elsewhere is not None and here.begun:
        others = [run for run in here.begun if not _is_same(run.path, elsewhere.path)]
        return _one([elsewhere, *others], f"{word} is a job, and the beginning of an id")
    if elsewhere is not None:
        return elsewhere.path
    if here.begun:
        return _one(here.begun, f"the ids of {len(here.begun)} runs begin with {word!r}")
    raise UsageError(f"{_why_none(word, cwd, told)}; {_hint(word, here.runs)}")


def _why_none(word: str, cwd: Path, told: JobsRuns) -> str:
    if told.known:
        return f"job {word} does not tell its run directory"
    if is_job(word):
        return f"there is no run {word} here, and Slurm does not answer, or knows no job {word} any more"
    return f"{word} is not a directory" if (cwd / word).exists() else f"{word} does not exist, nor a run of that name"


def newest(environment: Mapping[str, str] = os.environ, cwd: Path = Path()) -> FoundRun:
    """Return the run that a command without a name means: this job's own, else the newest, if only that is under way.

    Raises UsageError where there is none, or others are under way.
    """
    own = environment.get("RESILIO_RUN_DIR", "")
    for path in [*([Path(own)] if own else []), cwd]:
        if (path / "run.json").exists():
            return identify(path)
    known = _in_time(partial(_search, "", default_places(cwd)), cwd).runs
    runs = sorted(known, key=lambda run: run.created, reverse=True)
    if not runs:
        raise UsageError(f"there is no run here (in {_shown(cwd.absolute())}, or {RUNS} in it): name one")
    others = [run for run in runs[1:] if is_under_way(run.path)]
    if others:
        raise UsageError(f"which run? The newest is not the only one under way: {_listed([runs[0], *others])}")
    return runs[0]


def is_under_way(path: Path, now: float | None = None) -> bool:
    """Return whether a controller has told of the run lately, and not of its end."""
    try:
        told = (path / "status.json").stat().st_mtime
    except OSError:
        return False
    try:
        ended = (path / "verdict.json").stat().st_mtime
    except OSError:
        ended = float("-inf")
    return ended < told and (time.time() if now is None else now) - told < LIVES_S


@dataclass(frozen=True)
class _Search:
    """Runs in the places that can be read; those of that name or id, of that job, with such a beginning of their id."""

    runs: list[FoundRun]
    named: list[FoundRun]
    of_job: list[FoundRun]
    begun: list[FoundRun]


def _search(word: str, places: Sequence[Path]) -> _Search:
    found = list(map(identify, run_paths(places)))
    runs = [run for run in found if not run.problem]
    named = [run for run in found if word in (run.name, run.run_id)]
    of_this_job = [] if named or not word else [run for run in runs if run.has_job(word)]
    return _Search(runs, named, of_this_job, [run for run in runs if run.run_id.startswith(word.lower())])


def _existing(directories: Sequence[Path]) -> FoundRun | None:
    """Return the first that is a run's directory, be it damaged."""
    return next((identify(path) for path in directories if (path / "run.json").exists()), None)


def _is_same(path: Path, other: Path) -> bool:
    return os.path.realpath(path) == os.path.realpath(other)


def _in_time(act: Callable[[], _Result], cwd: Path) -> _Result:
    """Raise UsageError where the file system does not answer."""
    try:
        return bounded.in_time(act, SEARCH_S)
    except TimeoutError as error:
        raise UsageError(
            f"runs cannot be looked for in {_shown(cwd.absolute())}: {error.strerror}: give a path"
        ) from None


def _one(runs: Sequence[FoundRun], what: str) -> Path:
    if len(runs) == 1:
        return runs[0].path
    raise UsageError(f"{what}: {_listed(sorted(runs, key=lambda run: run.created, reverse=True))}")


def _hint(word: str, runs: Sequence[FoundRun]) -> str:
    if not runs:
        return "give the run directory that resilio-launch names"
    return f"runs here: {_listed(nearest(word, runs))}"


def nearest(word: str, runs: Sequence[FoundRun]) -> list[FoundRun]:
    """Return the runs, those first whose name or id is most like the word; of equal ones the newest. Pure."""

    def likeness(run: FoundRun) -> tuple[float, float]:
        names = (run.name, run.run_id)
        return max(difflib.SequenceMatcher(None, word.lower(), name.lower()).ratio() for name in names), run.created

    return sorted(runs, key=likeness, reverse=True)


def _listed(runs: Sequence[FoundRun]) -> str:
    named = [f"{run.run_id} ({_shown(run.path)})" for run in runs[:MOST_NAMED]]
    more = len(runs) - len(named)
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")


def _shown(path: Path) -> str:
    return printable(str(path), 200)
