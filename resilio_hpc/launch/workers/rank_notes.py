"""Numbers that a rank's process leaves in files beside its error file, for the agent: ``PID NUMBER``.

A file may be anything by the time it is read: the rank's program, or a child that it has forked, can write there, too.
"""

from __future__ import annotations

from pathlib import Path

from resilio_hpc.core import regular_file

MOST_S = 1e9
_MOST_BYTES = 64


def end_file(error_file: Path) -> Path:
    """Return the file that says that a rank's program is over."""
    return error_file.with_suffix(".ends")


def limit_file(error_file: Path) -> Path:
    """Return the file with the longest time limit of a rank's process groups."""
    return error_file.with_suffix(".waits")


def exit_code(error_file: Path, pid: int) -> int | None:
    """Return with which code this process is about to end; None where it runs, or never says so."""
    return _number(end_file(error_file), pid)


def may_wait_s(error_file: Path, pid: int) -> float:
    """Return for how many seconds torch lets this process wait in a call at most; 0 where that is not known."""
    return float(min(max(0, _number(limit_file(error_file), pid) or 0), MOST_S))


def _number(path: Path, pid: int) -> int | None:
    try:
        with open(regular_file.open_file(path), "rb") as file:
            process, _, number = file.read(_MOST_BYTES).decode().partition(" ")
        return int(number) if int(process) == pid else None
    except (OSError, ValueError):
        return None
