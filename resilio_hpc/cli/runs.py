"""``resilio runs [DIR …]``: my runs, the newest first, one line each."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from resilio_hpc.cli.ckpt.change import count
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.core import bounded, terminal
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.report.run_list import UnreadRun, summaries
from resilio_hpc.report.summary import RunSummary
from resilio_hpc.slurm.runs.places import default_places, run_paths

SEARCH_S = 20.0
WIDE = 200  # a file or a pipe has no width, so nothing is cut
_EXAMPLES = """examples:
  resilio runs                        those in ./resilio-runs, and in this directory
  resilio runs /scratch/me/*/resilio-runs -n 20
  resilio runs --json | jq '.runs[] | select(.state == "running") | .run_dir'
"""
_STYLES = {"running": "32", "starting": "33", "stale": "31"}
_HEADS = ("id", "job", "state", "step", "goodput", "age", "directory")
_NUMBERS = ("step", "goodput", "age")
_DIRECTORY = len(_HEADS) - 1
_NARROW, _LEAST_ID, _LEAST_DIRECTORY, _LONGEST_JOB, _LONGEST_STATE, _NARROW_STATE = 80, 6, 20, 10, 12, 10


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit code 0, also without a run; 2 for a directory that does not exist."""
    parser = Parser(
        prog="resilio runs",
        description="My runs, the newest first: id, newest job, state, step, goodput, age, directory. The id, or its "
        "beginning, and the job name a run in all commands.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("places", nargs="*", type=Path, metavar="DIR", help="where runs are, or a run (default: here)")
    parser.add_argument("-n", "--newest", type=count, metavar="N", help="only so many")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(argv)
    paths, others = find_runs(options.places)
    now = time.time()
    read = summaries(paths, now)
    runs = [one for one in read if isinstance(one, RunSummary)]
    runs = sorted(runs, key=lambda run: run.created or 0.0, reverse=True)[: options.newest]
    unread = [one for one in read if isinstance(one, UnreadRun)]
    if options.json:
        print(_as_json(runs, unread, now), flush=True)
        return 0
    _show(runs, unread, now)
    if others:
        print(f"resilio: {others} of other users are left out", file=sys.stderr)
    if not read and not others:
        print(f"resilio: no run in {', '.join(map(_shown, options.places or default_places()))}", file=sys.stderr)
    return 0


def find_runs(places: Sequence[Path]) -> tuple[list[Path], int]:
    """Return the paths of this user's runs, and how many there are of others. Raises UsageError."""
    try:
        return bounded.in_time(partial(_looked, places), SEARCH_S)
    except TimeoutError as error:
        where = ", ".join(map(_shown, places or default_places()))
        raise UsageError(f"runs cannot be looked for in {where}: {error.strerror}") from None


def _looked(places: Sequence[Path]) -> tuple[list[Path], int]:
    for place in places:
        if not place.is_dir():
            raise UsageError(f"{_shown(place)} is not a directory")
    paths = run_paths(places or default_places())
    mine = [path for path in paths if _is_mine(path)]
    return mine, len(paths) - len(mine)


def _is_mine(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.geteuid()
    except OSError:
        return True  # its line says what is wrong


def _as_json(runs: Sequence[RunSummary], unread: Sequence[UnreadRun], now: float) -> str:
    found = [{**asdict(run), "path": None, "run_dir": str(run.path.absolute())} for run in runs]
    for run in found:
        del run["path"]
    left = [{"run_dir": str(one.path.absolute()), "problem": one.problem} for one in unread]
    return json.dumps({"v": 1, "time": now, "runs": found, "unread": left}, indent=1)


# -- the table ---------------------------------------------------------------------------------------------------------


def _show(runs: Sequence[RunSummary], unread: Sequence[UnreadRun], now: float) -> None:
    console = terminal.console(highlight=False)
    width = console.width if console.is_terminal else WIDE
    colours = console.is_terminal and not console.no_color
    out = terminal.raw(sys.stdout)
    head, *lines = table(runs, now, width) if runs else [""]
    if runs:
        print(head, file=out)
    for run, line in zip(runs, lines, strict=True):
        print(coloured(run, line) if colours else line, file=out)
    for one in unread:
        print(f"not read: {_shown(one.path)}: {one.problem}")
    out.flush()


def coloured(run: RunSummary, line: str) -> str:
    """Return the line in the colour of the run's state. Pure."""
    style = "31" if run.exit_code not in (None, 0, 75) else _STYLES.get(run.state)
    return f"\x1b[{style}m{line}\x1b[0m" if style else line


def table(runs: Sequence[RunSummary], now: float, width: int) -> list[str]:
    """Return a head and a line for each run, none longer than ``width`` where that is 60 or more. Pure.

    In a narrow terminal ids are shortened to what is unique, and directories to their ends.
    """
    narrow = width < _NARROW
    rows = [_HEADS, *(_cells(run, now, narrow) for run in runs)]
    gap = " " if narrow else "  "
    others = [max(len(row[column]) for row in rows) for column in range(1, _DIRECTORY)]
    room = width - sum(others) - len(gap) * _DIRECTORY
    whole, longest = max(len(row[0]) for row in rows), max(len(row[_DIRECTORY]) for row in rows)
    if room < whole + min(longest, _LEAST_DIRECTORY):
        whole = min(whole, unique_length([run.run_id for run in runs]))
    return [_line(row, (whole, *others), max(room - whole, 1), gap) for row in rows]


def _line(row: Sequence[str], widths: Sequence[int], of_directory: int, gap: str) -> str:
    cells = [row[0][: widths[0]].ljust(widths[0])]
    for column in range(1, _DIRECTORY):
        is_number = _HEADS[column] in _NUMBERS
        cells.append(row[column].rjust(widths[column]) if is_number else row[column].ljust(widths[column]))
    path = row[_DIRECTORY]
    cells.append(path if len(path) <= of_directory else f"…{path[len(path) - of_directory + 1 :]}")
    return gap.join(cells).rstrip()


def _cells(run: RunSummary, now: float, narrow: bool) -> tuple[str, ...]:
    share = "-" if run.goodput is None else f"{'' if run.steps_known else '≤'}{run.goodput:.{0 if narrow else 1}%}"
    return (
        run.run_id, _job(run.job), printable(state_text(run), _NARROW_STATE if narrow else _LONGEST_STATE),
        "-" if run.step is None else str(run.step), share,
        "-" if run.created is None else age_text(now - run.created), _shown(run.path),
    )  # fmt: skip


def state_text(run: RunSummary) -> str:
    """Return the state in a word or two; of a run that has ended, its verdict. Pure."""
    return printable(run.verdict.replace("_", " "), 40) if run.state == "ended" else run.state


def age_text(seconds: float) -> str:
    """Return ``5s``, ``12m``, ``3h``, ``9d``. Pure."""
    whole = max(0, int(seconds))
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if whole >= 2 * size:
            return f"{whole // size}{unit}"
    return f"{whole}s"


def unique_length(ids: Sequence[str]) -> int:
    """Return how many characters tell all ids apart, at least six. Pure."""
    length = _LEAST_ID
    while len({one[:length] for one in ids}) < len(set(ids)):
        length += 1
    return length


def _job(job: str) -> str:
    return "local" if job.startswith("local-") else printable(job or "-", _LONGEST_JOB)


def _shown(path: Path) -> str:
    return printable(str(path), 500)
