"""The run directories below the places where launches make them. Nothing is read but names and ``run.json``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.core import trusted_files
from resilio_hpc.core.errors import Untrusted
from resilio_hpc.core.json_fields import Fields, parse_object, printable
from resilio_hpc.slurm.chain import chain
from resilio_hpc.slurm.runs.of_job import RUNS

IDENTITY = "run.json"
_HALF_MADE = ("secret", "ledger")  # a launch makes these before run.json
MOST_BYTES = 1 << 20  # of run.json


@dataclass(frozen=True)
class FoundRun:
    """A run directory. ``created``: Unix seconds, 0.0 where not known; ``problem``: why it cannot be read, or ""."""

    path: Path
    run_id: str = ""
    created: float = 0.0
    problem: str = ""

    @property
    def name(self) -> str:
        """Return the last part of the path."""
        return self.path.name

    def has_job(self, job: str) -> bool:
        """Return whether a job, or a part of one (``12r1``), is or was this run's, as the directory tells."""
        try:
            if (self.path / "links" / f"{job}.json").exists() or (self.path / "joiners" / f"{job}.out").exists():
                return True
            return job in [link.job for link in chain.read_links(self.path)]
        except (OSError, Untrusted):
            return False


def default_places(cwd: Path = Path()) -> tuple[Path, ...]:
    """Return the places to search: ``resilio-runs`` here, and this directory. Pure."""
    return cwd / RUNS, cwd


def run_paths(places: Sequence[Path]) -> list[Path]:
    """Return run directories that are a place or directly in one, each once.

    In a directory of that name without ``run.json``, those of an array's tasks are looked for, too. A place that is
    missing or unreadable has none.
    """
    found: dict[str, Path] = {}
    for place in places:
        for path in _below(place):
            with contextlib.suppress(OSError):
                found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def _below(place: Path) -> Iterator[Path]:
    if _is_run(place):
        yield place
        return
    for path in _folders(place):
        if _is_run(path):
            yield path
        elif path.name.isdecimal():  # a folder of an array: its tasks' runs
            yield from (inner for inner in _folders(path) if _is_run(inner))


def _folders(place: Path) -> list[Path]:
    try:
        with os.scandir(place) as entries:
            return [Path(entry.path) for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except OSError:
        return []


def _is_run(path: Path) -> bool:
    """Return whether it is a run's directory, be it half made or unreadable."""
    try:
        (path / IDENTITY).lstat()
        return True
    except PermissionError:
        return path.parent.name == RUNS
    except OSError:
        return all((path / name).exists() for name in _HALF_MADE)


def identify(path: Path) -> FoundRun:
    """Return what ``run.json`` says. Raises nothing: the answer holds a problem."""
    try:
        real = trusted_files.run_directory(path) if path.is_symlink() else path  # only a link of this user's or root's
        content = trusted_files.read(real / IDENTITY, MOST_BYTES)
    except FileNotFoundError:
        return FoundRun(path, problem="it is half made: it has no run.json yet, or its launch was killed")
    except Untrusted as error:
        return FoundRun(path, problem=str(error))
    except OSError as error:
        return FoundRun(path, problem=f"it cannot be read: {error.strerror}")
    fields = Fields.of(parse_object(content))
    run_id = printable(fields.text("run_id"), 40)
    if not run_id:
        return FoundRun(path, problem="its run.json is damaged")
    return FoundRun(path, run_id, fields.time("created") or 0.0)
