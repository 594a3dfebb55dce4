"""The argument that names a run, the same for all commands."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from resilio_hpc.core import trusted_files
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.slurm.runs import run_names


def add(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """Add the argument ``run``. ``optional``: without it, the newest run is meant."""
    more = " (default: the newest here)" if optional else ""
    parser.add_argument("run", nargs="?" if optional else None, metavar=run_names.METAVAR, help=run_names.HELP + more)


def run_of(options: argparse.Namespace) -> Path:
    """Return the path of the run that the argument names; say which it is where none was named. Raises UsageError."""
    return newest_run() if options.run is None else run_names.run_path(options.run)


def directory_of(options: argparse.Namespace) -> Path:
    """Return the run's directory, which is there and the user's own. Raises UsageError, Untrusted."""
    path = run_of(options)
    if not (path / "run.json").exists():
        raise UsageError(f"{path} is no run directory (it has no run.json): name the one that resilio-launch names")
    return trusted_files.run_directory(path)


def newest_run() -> Path:
    """Return the path of the run that is meant where none is named; say which one. Raises UsageError."""
    found = run_names.newest()
    print(f"resilio: run {found.run_id or '?'} in {printable(str(found.path), 500)}, the newest here", file=sys.stderr)
    return found.path
