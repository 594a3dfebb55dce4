"""``resilio top [DIR …]``: my runs as ``resilio runs`` lists them, refreshed on the terminal."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from resilio_hpc.cli import runs as listed
from resilio_hpc.cli.common.keys import PressedKeys
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.core import terminal
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.core.terminal import local_time
from resilio_hpc.report.run_list import UnreadRun, summaries
from resilio_hpc.report.summary import RunSummary
from resilio_hpc.report.watched_runs import WatchedRuns

EVERY_S = 2.0
SEARCH_EVERY_S = 10.0  # for runs that are new
_STATES = ("running", "starting", "stale", "ended")
_KEYS = "q quit   a all or those under way   up, down, space: scroll"
_EXAMPLES = """examples:
  resilio top                                 the runs here
  resilio top /scratch/me/*/resilio-runs --every 10

keys: q quit; a all runs, or those under way; up, down, space, page up: scroll
Where standard output is no terminal, the list is printed once. For programs: resilio runs --json.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit code 0 after q, or without a terminal; 130 after Ctrl-C; 2 for a mistake."""
    parser = Parser(
        prog="resilio top",
        description="My runs on one screen, refreshed: those under way first, then the newest.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("places", nargs="*", type=Path, metavar="DIR", help="where runs are, or a run (default: here)")
    parser.add_argument("--every", type=_seconds, default=EVERY_S, metavar="S", help=f"refresh (default: {EVERY_S:g})")
    options = parser.parse_args(argv)
    console = terminal.console(highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        return listed.main([*map(str, options.places)])
    signal.signal(signal.SIGTERM, _end)
    board = _Board(options.places)
    with PressedKeys() as keys, console.screen(hide_cursor=True):
        while True:
            board.look()
            due = time.monotonic() + float(options.every)
            while (left := due - time.monotonic()) > 0:
                _draw(board.lines(console.height, console.width))
                key = keys.wait(left)
                if key in ("q", "escape"):
                    return 0
                board.press(key, console.height)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"{printable(repr(text), 40)}: seconds, from 0.1 to a day")
    return value


def _end(_number: int, _frame: FrameType | None) -> None:
    sys.exit(143)  # through the contexts, which give the terminal back


def _draw(lines: Sequence[str]) -> None:
    out = terminal.raw(sys.stdout)
    out.write("\x1b[H" + "\x1b[K\n".join(lines) + "\x1b[K\x1b[J")
    out.flush()


class _Board:
    """The runs, and which of them are on the screen."""

    def __init__(self, places: Sequence[Path]) -> None:
        self._places = places
        self._watched = WatchedRuns()
        self._paths: list[Path] = []
        self._others, self._searched = 0, float("-inf")
        self._now = 0.0
        self._runs: list[RunSummary] = []
        self._unread: list[UnreadRun] = []
        self._problem = ""
        self._top, self._all = 0, True

    def look(self) -> None:
        """Read what has changed. Raises UsageError where the first look finds no directory."""
        if time.monotonic() - self._searched >= SEARCH_EVERY_S:
            try:
                self._paths, self._others = listed.find_runs(self._places)
                self._problem = ""
            except UsageError as error:  # a directory that is gone, a file system that hangs
                if not self._runs and self._searched == float("-inf"):
                    raise
                self._problem = str(error)
            self._searched = time.monotonic()
            self._watched.forget(set(self._paths))
        self._now = time.time()
        read = summaries(self._paths, self._now, read=self._watched.read)
        self._unread = [one for one in read if isinstance(one, UnreadRun)]
        runs = [one for one in read if isinstance(one, RunSummary)]
        self._runs = sorted(runs, key=lambda run: (run.state == "ended", -(run.created or 0.0)))

    def press(self, key: str, height: int) -> None:
        """Take a key."""
        page = max(1, height - 4)
        moves = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -page, "page down": page}
        if key == "a":
            self._all, self._top = not self._all, 0
        self._top = max(0, self._top + moves.get(key, 0))

    def lines(self, height: int, width: int) -> list[str]:
        """Return the screen."""
        counts = Counter(run.state for run in self._runs)
        states = ", ".join(f"{counts[state]} {state}" for state in _STATES if counts[state]) or "no run"
        not_read = f", {len(self._unread)} not read" if self._unread else ""
        head = f"resilio top  {local_time(self._now, '%H:%M:%S')}  {states}{not_read}"
        shown = [run for run in self._runs if self._all or run.state != "ended"]
        room = max(1, height - 3 - len(self._notes()))
        self._top = min(self._top, max(0, len(shown) - room))
        some = shown[self._top : self._top + room]
        body: list[str] = []
        if some:
            first, *rows = listed.table(some, self._now, width)
            body = [f"\x1b[2m{first[:width]}\x1b[0m"]
            body += [listed.coloured(run, line[:width]) for run, line in zip(some, rows, strict=True)]
        hidden = len(shown) - len(some)
        foot = f"{_KEYS}   {self._top + 1}-{self._top + len(some)} of {len(shown)}" if hidden else _KEYS
        notes = [f"\x1b[33m{printable(note, width)}\x1b[0m" for note in self._notes()]
        return [head[:width], *body, *notes, f"\x1b[2m{foot[:width]}\x1b[0m"][:height]

    def _notes(self) -> list[str]:
        notes = [f"not read: {one.path}: {one.problem}" for one in self._unread[:2]]
        return [*notes, self._problem] if self._problem else notes
