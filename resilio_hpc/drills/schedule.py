"""The lines of a crontab or a scrontab that do drills now and then. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.core.errors import UsageError


@dataclass(frozen=True)
class DrillSchedule:
    """When which drills are done. ``day``: of the month; None: on Sundays. Times in seconds.

    ``run``: a live run's directory; None: dev clusters. ``command``: the words of this installation's ``resilio``.
    """

    names: tuple[str, ...]
    command: tuple[str, ...]
    evidence: Path
    hour: int
    minute: int
    day: int | None = 1
    run: Path | None = None
    jitter_s: int = 0
    limit_s: int = 3600

    @property
    def title(self) -> str:
        """Return the name of its block in a table: one for each list of drills and run."""
        return " ".join([*self.names, *([f"on {self.run}"] if self.run is not None else [])])

    @property
    def log(self) -> Path:
        """Return the file that what it prints is added to."""
        return self.evidence / "schedule.log"

    def _fields(self) -> str:
        days = f"{self.day} * *" if self.day is not None else "* * 0"
        return f"{self.minute} {self.hour} {days}"

    def _drill(self) -> str:
        run = ("--run", str(self.run)) if self.run is not None else ()
        return shlex.join([*self.command, "drill", "run", *self.names, *run, "--yes", "--evidence", str(self.evidence)])

    def _wait(self) -> str:
        return f"sleep $(shuf -i 0-{self.jitter_s} -n 1); " if self.jitter_s else ""

    def cron(self) -> list[str]:
        """Return the lines for crontab. flock keeps two from running at once: the later one does nothing."""
        lock = shlex.quote(str(self.evidence / "schedule.lock"))
        log = shlex.quote(str(self.log))
        folder = shlex.quote(str(self.evidence))
        command = f"{self._wait()}mkdir -p {folder} && flock -n -E 0 {lock} {self._drill()} >>{log} 2>&1"
        return [f"{self._fields()} {_escaped(command)}"]

    def scrontab(self) -> list[str]:
        """Return the lines for scrontab. Slurm starts no second job of the same name (singleton)."""
        hours, rest = divmod(self.limit_s, 3600)
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"resilio-drill-{'-'.join(self.names)}")[:60]
        minutes, seconds = divmod(rest, 60)
        return [
            f"#SCRON --job-name={name}",
            f"#SCRON --time={hours:02d}:{minutes:02d}:{seconds:02d}",
            "#SCRON --dependency=singleton",
            f"#SCRON --output={_one_word(self.log)}",
            "#SCRON --open-mode=append",
            f"{self._fields()} {self._wait()}{self._drill()}",
        ]


def _escaped(command: str) -> str:
    """Return a command as cron needs it, which takes a bare % for a newline."""
    return command.replace("%", "\\%")


def _one_word(path: Path) -> str:
    """Return a path for an option of Slurm, where % begins a pattern. Raises UsageError for spaces."""
    text = str(path)
    if any(letter.isspace() or letter in "\"'" for letter in text):
        raise UsageError(f"--evidence {text!r}: scrontab takes no path with spaces or quotes")
    return text.replace("%", "%%")


def time_of_day(text: str) -> tuple[int, int]:
    """Return hour and minute of ``HH:MM``. Raises UsageError."""
    found = re.fullmatch(r"(\d{1,2}):(\d{2})", text)
    hour, minute = (int(found[1]), int(found[2])) if found else (99, 99)
    if hour > 23 or minute > 59:
        raise UsageError(f"--at {text!r}: a time of day such as 03:17 is needed")
    return hour, minute


def with_block(table: str, title: str, lines: Sequence[str]) -> str:
    """Return a table with these lines in the block of this title, in place of what the block held before."""
    begin, end = f"# resilio drill: {title}", f"# end of resilio drill: {title}"
    kept, inside = [], False
    for line in table.splitlines():
        if line == begin:
            inside = True
        elif inside and line == end:
            inside = False
        elif not inside:
            kept.append(line)
    if inside:
        raise UsageError(f"the table has the line {begin!r} and not {end!r}: mend it by hand first")
    return "\n".join([*kept, begin, *lines, end]) + "\n"
