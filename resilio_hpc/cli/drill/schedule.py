"""``resilio drill schedule``: prints the lines of a crontab or scrontab, or writes them."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from resilio_hpc.cli.common import run_argument
from resilio_hpc.cli.common.confirm import confirmed
from resilio_hpc.core.errors import CommandError, UsageError
from resilio_hpc.core.process import Completed, run
from resilio_hpc.drills.drill_words import drill_of, is_live, slug
from resilio_hpc.drills.schedule import DrillSchedule, time_of_day, with_block
from resilio_hpc.slurm.client import runner

LIMIT_S = 30.0  # for crontab and scrontab


def main(options: argparse.Namespace) -> int:
    """Print or write the lines. Exit code 0; 1 where they were not written. Raises UsageError, CommandError."""
    schedule = _schedule(options)
    lines = schedule.scrontab() if options.scrontab else schedule.cron()
    if not options.install:
        print("\n".join(lines), flush=True)
        if options.scrontab and not schedule.evidence.is_dir():
            print(f"resilio: make this directory first: mkdir -p {schedule.evidence}", file=sys.stderr)
        return 0
    tool = "scrontab" if options.scrontab else "crontab"
    for program in (tool, *(() if options.scrontab else ("flock",))):
        if shutil.which(program) is None:
            raise UsageError(
                f"{program} is not installed here: without --install the lines are printed, to be put in by hand"
            )
    before = _table(tool)
    after = with_block(before, schedule.title, lines)
    if after == before:
        print(f"your {tool} has these lines already", flush=True)
        return 0
    print("\n".join(lines), flush=True)
    if not confirmed(f"write this to your {tool}?", options.yes):
        return 1
    schedule.evidence.mkdir(parents=True, exist_ok=True)
    _write(tool, after)
    print(f"written; see: {tool} -l", flush=True)
    return 0


def _schedule(options: argparse.Namespace) -> DrillSchedule:
    drills = [drill_of(name) for name in options.names]
    run = run_argument.directory_of(argparse.Namespace(run=options.run)) if options.run else None
    if run is not None:
        hurtful = [slug(drill.full_name) for drill in drills if not is_live(drill)]
        if hurtful:
            raise UsageError(f"{', '.join(hurtful)}: not for a live run (resilio drill list --where live)")
    elif options.scrontab:
        raise UsageError(
            "scrontab's jobs run as you on a compute node, and a dev cluster needs root: give --run, or --cron"
        )
    hour, minute = time_of_day(options.at)
    return DrillSchedule(
        names=tuple(slug(drill.full_name) for drill in drills), command=_command(),
        evidence=options.evidence.absolute(),
        hour=hour, minute=minute, day=None if options.weekly else int(options.day), run=run,
        jitter_s=int(options.jitter), limit_s=int(options.time),
    )  # fmt: skip


def _command() -> tuple[str, ...]:
    """Return how this installation's command is called from anywhere."""
    script = Path(sys.executable).with_name("resilio")
    return (str(script),) if script.exists() else (sys.executable, "-m", "resilio_hpc.cli.main")


def _run(tool: str, argv: list[str]) -> Completed:
    return runner.run_here(argv, LIMIT_S) if tool == "scrontab" else run(argv, LIMIT_S)


def _table(tool: str) -> str:
    """Return the user's table; both commands fail with words where there is none yet."""
    try:
        return _run(tool, [tool, "-l"]).stdout
    except CommandError as error:
        if "no crontab" in str(error).lower():
            return ""
        raise


def _write(tool: str, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", prefix="resilio-drill-") as file:
        file.write(text)
        file.flush()
        _run(tool, [tool, file.name])
