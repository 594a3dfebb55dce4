"""Where the ranks' output of a run is: ``logs/ROUND/NODE/RANK.log``, or below the launch's ``--log-dir``.

Standard error has a file of its own (``RANK.err.log``) where streams are kept apart. ``RANK.part2.log`` goes on where a
node lost its disk, or its agent was started again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.core import trusted_files
from resilio_hpc.core.errors import Untrusted
from resilio_hpc.core.json_fields import Fields

MOST_NODES = 100_000
_NAME = re.compile(r"(\d{1,9})(\.err)?(?:\.part(\d{1,6}))?\.log")


@dataclass(frozen=True)
class RankLog:
    """One file of a rank's output. ``stream``: out (both, where they are not kept apart) or err."""

    path: Path
    round: int
    node: str
    rank: int
    stream: str = "out"
    part: int = 1


def log_directory(run: Path) -> Path:
    """Return where the newest launch of a run keeps its ranks' output. Raises Untrusted."""
    options = Fields.of(trusted_files.read_object(run / "launch.json")).inner("options")
    elsewhere = options.inner("output").text("log_dir")
    return Path(elsewhere) if elsewhere else run / "logs"


def rounds(directory: Path) -> list[int]:
    """Return the rounds of which there is output, in order."""
    return sorted(int(name) for name in _folders(directory) if name.isdecimal() and len(name) < 10)


def logs_of(directory: Path, number: int) -> list[RankLog]:
    """Return the files of a round, by rank. What has another name is left out."""
    found = []
    folder = directory / str(number)
    for node in _folders(folder)[:MOST_NODES]:
        for path, match in _named(folder / node):
            stream = "err" if match[2] else "out"
            found.append(RankLog(path, number, node, int(match[1]), stream, int(match[3] or 1)))
    return sorted(found, key=lambda log: (log.rank, log.node, log.stream == "err", log.part))


def last_lines(path: Path, count: int, most_bytes: int = 1 << 20) -> list[bytes]:
    """Return the last lines of a file, of its last ``most_bytes`` at most. Raises OSError, Untrusted."""
    with open(trusted_files.open_file(path), "rb") as file:
        begin = max(0, os.fstat(file.fileno()).st_size - most_bytes)
        file.seek(begin)
        text = file.read(most_bytes)
    lines = text.removesuffix(b"\n").split(b"\n") if text else []
    if begin and len(lines) > 1:
        lines = lines[1:]  # the rest of a line that was cut
    return lines[max(0, len(lines) - count) :]


def error_lines(logs: Sequence[RankLog], rank: int, count: int) -> tuple[Path | None, list[bytes]]:
    """Return where a rank's errors are, and the last lines there; None and no lines where nothing can be read."""
    for log in sorted((one for one in logs if one.rank == rank), key=lambda one: (one.stream == "out", -one.part)):
        try:
            lines = last_lines(log.path, count)
        except (OSError, Untrusted):
            continue
        if lines:
            return log.path, lines
    return None, []


def _folders(place: Path) -> list[str]:
    try:
        with os.scandir(place) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _named(folder: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    except OSError:
        return
    for name in names:
        match = _NAME.fullmatch(name)
        if match is not None:
            yield folder / name, match
