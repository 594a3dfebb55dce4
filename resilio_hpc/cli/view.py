"""``resilio view [RUN]``: a live view of a run, until its job has a verdict."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType

from rich.console import Console
from rich.live import Live

from resilio_hpc.cli.common import run_argument
from resilio_hpc.core import terminal
from resilio_hpc.events.event_text import words
from resilio_hpc.report.overview import Overview, RunReader, is_closed
from resilio_hpc.report.screen import checkpoint_words, screen, state_words
from resilio_hpc.report.screen_tables import QUIET, clock

REFRESH_S = 0.5
RECENT = 5  # events
PLAIN_EVERY_S = 60.0


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit code 0 when the job has a verdict; 130 after Ctrl-C; 2 without a run."""
    parser = argparse.ArgumentParser(
        prog="resilio view",
        description="A run as it goes: nodes, ranks, round, step rate, last checkpoint, faults. "
        "Plain lines where standard output is no terminal. Ends with the job's verdict, or with Ctrl-C.",
    )
    run_argument.add(parser, optional=True)
    parser.add_argument("--launcher", type=int, default=0, help=argparse.SUPPRESS)  # end when this parent is gone
    parser.add_argument("--since", type=float, default=0.0, help=argparse.SUPPRESS)  # older verdicts do not count
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _end)
    if options.launcher:
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # these warnings are for the launcher
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
        with Live(console=console, auto_refresh=False, vertical_overflow="crop", redirect_stdout=False,
                  redirect_stderr=False) as live:  # fmt: skip
            while True:
                overview = self._look()
                live.update(screen(overview, console.height - 1, RECENT, console.width), refresh=True)
                if self._over(overview):
                    return
                time.sleep(REFRESH_S)

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


def progress(o: Overview) -> str:
    """Return one line about the run's state, for a file."""
    parts = [state_words(o)]
    if o.status is not None and o.status.step is not None:
        rate = o.status.steps_per_s
        parts.append(f"step {o.status.step}{f' at {rate:.3g} steps/s' if rate else ''}")
    return "; ".join([*parts, f"checkpoint: {checkpoint_words(o)}"])
