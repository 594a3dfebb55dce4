"""``resilio view [RUN]``: a live view of a run, until its job has a verdict."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from resilio_hpc.cli.common import run_argument
from resilio_hpc.cli.common.keys import PressedKeys
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.cli.web_view import serve
from resilio_hpc.core import terminal
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import Fields, printable
from resilio_hpc.events.event_text import words
from resilio_hpc.report.chain.first_error import read_first_error
from resilio_hpc.report.overview import Overview, RunReader, is_closed
from resilio_hpc.report.rank_logs import error_lines, log_directory, logs_of, rounds
from resilio_hpc.report.screen import checkpoint_words, screen, state_words
from resilio_hpc.report.screen_tables import QUIET, clock, domain_of, event_lines, node_lines, with_trouble

REFRESH_S = 0.5
RECENT = 5  # events
PLAIN_EVERY_S = 60.0
PAGES = ("n", "e", "l")
KEYS = "n nodes   e events   l log of the failing rank   q quit"
_EXAMPLES = """examples:
  resilio view                    the newest run here
  resilio view 4712 --web         in a browser on this machine, behind a token; it shows no more than resilio report
  resilio view 4712 > view.log    plain lines

keys: n all nodes, e events, l the end of the failing rank's output, q quit
exit codes: 0 the job has a verdict, or after q; 130 after Ctrl-C; 2 a mistake in the command, or no such run
"""
BACK = "any other key: back   "


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit code 0 when the job has a verdict; 130 after Ctrl-C; 2 without a run."""
    parser = Parser(
        prog="resilio view",
        description="A run as it goes: step, pace, expected end, logged values, last checkpoint, faults, nodes.\n"
        "Plain lines where standard output is no terminal. Ends with the job's verdict, with q, or with Ctrl-C.",
        epilog=_EXAMPLES,
    )
    run_argument.add(parser, optional=True)
    parser.add_argument(
        "--web", action="store_true", help="the report's page, live: for a browser on this machine, behind a token"
    )
    parser.add_argument("--port", type=int, default=0, metavar="N", help="with --web (default: any that is free)")
    parser.add_argument("--launcher", type=int, default=0, help=argparse.SUPPRESS)  # end when this parent is gone
    parser.add_argument("--since", type=float, default=0.0, help=argparse.SUPPRESS)  # older verdicts do not count
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _end)
    if options.launcher:
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # these warnings are for the launcher
    if options.port and not (options.web and 0 < options.port < 65_536):
        raise UsageError("--port goes with --web, and is a number from 1 to 65535")
    if options.web:
        return serve(run_argument.run_of(options), options.port)
    viewer = _Viewer(RunReader(run_argument.run_of(options)), options.launcher, options.since)
    console = terminal.console(highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        viewer.draw(console)
    else:
        viewer.tell()
    return 0


def _end(_number: int, _frame: FrameType | None) -> None:
    sys.exit(143)  # through ``with Live``, which restores the cursor


class _Viewer:
    def __init__(self, reader: RunReader, launcher: int, since: float) -> None:
        self._reader = reader
        self._launcher = launcher
        self._since = since

    def _look(self) -> Overview:
        return self._reader.overview(time.time(), self._since)

    def _over(self, overview: Overview) -> bool:
        return is_closed(overview) or bool(self._launcher and os.getppid() != self._launcher)

    def draw(self, console: Console) -> None:
        live = Live(
            console=console, auto_refresh=False, vertical_overflow="crop", redirect_stdout=False, redirect_stderr=False
        )
        with PressedKeys() as keys, live:
            page = ""
            while True:
                overview = self._look()
                height, width = console.height - 1, console.width
                over = self._over(overview)
                shown = "" if over else page  # the last picture is the first page, which stays on the terminal
                foot = KEYS if keys.are_read and not over else ""
                live.update(_page(shown, overview, height, width, foot), refresh=True)
                if over:
                    return
                key = keys.wait(REFRESH_S)
                if key == "q":
                    live.update(_page("", overview, height, width, ""), refresh=True)
                    return
                page = key if key in PAGES and key != page else "" if key else page

    def tell(self) -> None:
        next_progress = 0.0
        while True:
            overview = self._look()
            for event in self._reader.new_events():
                if event.kind not in QUIET and event.time >= self._since:
                    print(f"{clock(event.time)} {words(event.kind, event.fields)}")
            if self._over(overview):
                break
            if time.monotonic() >= next_progress:
                next_progress = time.monotonic() + PLAIN_EVERY_S
                print(f"{clock(overview.now)} {progress(overview)}")
            sys.stdout.flush()
            time.sleep(REFRESH_S)
        sys.stdout.flush()


def _page(name: str, o: Overview, height: int, width: int, foot: str) -> RenderableType:
    """Return the page of a key, in at most ``height`` lines."""
    if name == "n" and o.status is not None:
        nodes = with_trouble(o)
        lines = node_lines(nodes, height - 1, width, domain_of(o.status.nodes))
    elif name == "e":
        lines = event_lines(o, height - 1, width)
    elif name == "l":
        lines = list(_log_lines(o, height - 1, width))
    else:
        return screen(o, height, RECENT, width, internals=False, foot=foot)
    return Group(*lines[: height - 1], Text(f"{BACK}{foot}"[:width] if foot else "", "dim"))


def _log_lines(o: Overview, count: int, width: int) -> Iterator[Text]:
    """Yield the end of the output of the rank that failed first; without a failure, of the lowest rank."""
    error = read_first_error(o.path)
    directory = log_directory(o.path)
    known = rounds(directory)
    number = Fields(error.fields).whole("round") if error is not None else None
    number = number if number is not None else known[-1] if known else None
    logs = logs_of(directory, number) if number is not None else []
    rank = error.rank if error is not None else min((log.rank for log in logs), default=None)
    if rank is None or number is None:
        yield Text("No rank has written anything yet.", "dim")
        return
    path, lines = error_lines(logs, rank, count - 1)
    what = "the first that failed" if error is not None else "no rank has failed"
    yield Text(f"rank {rank}, round {number} ({what}): {printable(str(path or 'no output'), 300)}"[:width], "bold")
    for line in lines:
        yield Text(printable(line.decode(errors="replace").rstrip("\r").rpartition("\r")[2], width), no_wrap=True)


def progress(o: Overview) -> str:
    """Return one line about the run's state, for a file."""
    parts = [state_words(o)]
    if o.status is not None and o.status.step is not None:
        rate = o.status.steps_per_s
        parts.append(f"step {o.status.step}{f' at {rate:.3g} steps/s' if rate else ''}")
    return "; ".join([*parts, f"checkpoint: {checkpoint_words(o)}"])
