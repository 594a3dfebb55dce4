"""``resilio drill list | run | schedule``: faults made on purpose, and what became of the run."""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Sequence
from pathlib import Path

from resilio_hpc.cli.common.number_option import number
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable

_EXAMPLES = """examples:
  resilio drill list                                     every drill: what it does, what should happen, where
  resilio drill run rank-sigkill rank-sigstop            on dev clusters made for them (root and Slurm here)
  resilio drill run rank-sigkill --run 4711 --dry-run    what would be done to a run of your own that trains
  resilio drill run rank-sigkill --run 4711              do it, after a question
  resilio drill run --campaign --mtbf 60 --duration 600 --results soak.jsonl
  resilio drill schedule rank-sigkill --monthly --scrontab --run /scratch/me/run
"""
_EXIT_CODES = (
    "exit codes: 0 every drill passed; 1 one did not, or could not be done; 2 a mistake in the command, or refused; "
    "130 interrupted"
)
MOST_REPEATS, MOST_S = 1000, 1e6


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit codes: see _EXIT_CODES."""
    parser = Parser(
        prog="resilio drill", description="Faults made on purpose, and what became of the run.",
        epilog=_EXAMPLES + _EXIT_CODES,
    )  # fmt: skip
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="list | run | schedule")
    _list_options(_verb(verbs, "list", "every drill: what it does, what should happen, where it can be done"))
    _run_options(_verb(verbs, "run", "do drills on a dev cluster, or to a run of your own, or a campaign"))
    _schedule_options(_verb(verbs, "schedule", "a line for crontab or scrontab that does drills every month"))
    options = parser.parse_args(argv)
    module = {"list": "list_drills", "run": _way_of(options), "schedule": "schedule"}[options.verb]
    return int(importlib.import_module(f"resilio_hpc.cli.drill.{module}").main(options))


def _verb(verbs: argparse._SubParsersAction[Parser], name: str, summary: str) -> Parser:
    return verbs.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog=_EXAMPLES + _EXIT_CODES
    )


def _way_of(options: argparse.Namespace) -> str:
    """Return the module that does what ``run`` is asked for. Raises UsageError where options do not go together."""
    if options.verb != "run":
        return ""
    if options.campaign:
        if options.names or options.run or options.cluster:
            raise UsageError("--campaign draws its faults, on a cluster of its own: leave names, --run, --cluster out")
        return "campaign"
    if not options.names:
        raise UsageError("name at least one drill (resilio drill list), or give --campaign")
    if options.run and (options.cluster or options.repeats != 1):
        raise UsageError("--run is a live run: --cluster and --repeats are for dev clusters")
    return "live" if options.run else "on_cluster"


def _list_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--where", choices=("dev", "live"), help="only those that can be done there")
    parser.add_argument("--srun", action="store_true", help="also those of jobs that begin with one srun")
    parser.add_argument("--json", action="store_true", help="for programs")


def _run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="drills of the list")
    parser.add_argument("--evidence", type=Path, default=Path("resilio-drills"), metavar="DIR",
                        help="where each drill's folder goes (default: resilio-drills)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="for programs: a line for each drill")
    parser.add_argument("--yes", action="store_true", help="ask nothing")
    cluster = parser.add_argument_group("on a dev cluster")
    cluster.add_argument(
        "--cluster", default="", metavar="NAME", help="a dev cluster that is up (default: one for each)"
    )
    cluster.add_argument("--repeats", type=number(1, MOST_REPEATS, whole=True), default=1, metavar="N",
                         help="so often each")  # fmt: skip
    cluster.add_argument(
        "--slurm", default="", metavar="SERIES", help="of a cluster that is made (default: this host's)"
    )
    cluster.add_argument("--no-torch", action="store_true", help="ranks sum over sockets, without torch: quicker")
    live = parser.add_argument_group("to a live run of your own")
    live.add_argument("--run", default="", metavar="RUN", help="its directory, or the number of one of its jobs")
    live.add_argument("--rank", type=number(0, 1e7, whole=True), metavar="N", help="whom it meets (default: by chance)")
    live.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    live.add_argument("--force", action="store_true", help="also where no checkpoint is there yet")
    campaign = parser.add_argument_group("a campaign: one long run under faults drawn by chance")
    campaign.add_argument("--campaign", action="store_true", help="do one")
    campaign.add_argument("--mtbf", type=_seconds, default=60.0, metavar="TIME", help="mean time between faults (60s)")
    campaign.add_argument("--duration", type=_seconds, default=600.0, metavar="TIME", help="of the faults (10m)")
    campaign.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn (0)")
    campaign.add_argument("--no-twin", action="store_true", help="without the same run that has no faults")
    campaign.add_argument("--faults", metavar="NAME=WEIGHT,…", help="only these, so often beside each other")
    campaign.add_argument("--nodes", type=number(3, 64, whole=True), default=4, metavar="N", help="of the run (4)")
    campaign.add_argument("--results", type=Path, metavar="FILE", help="add each fault here; the same file goes on")


def _schedule_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="drills of the list")
    parser.add_argument("--run", default="", metavar="RUN", help="a live run's directory (default: dev clusters)")
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--monthly", action="store_true", help="on --day of each month (the default)")
    when.add_argument("--weekly", action="store_true", help="on Sundays")
    parser.add_argument("--day", type=number(1, 28, whole=True), default=1, metavar="N", help="of the month (1)")
    parser.add_argument("--at", default="03:17", metavar="HH:MM", help="(03:17)")
    parser.add_argument("--jitter", type=_seconds, default=0.0, metavar="TIME", help="begin by chance within so long")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--cron", action="store_true", help="for crontab (the default)")
    form.add_argument("--scrontab", action="store_true", help="for Slurm's scrontab")
    parser.add_argument("--time", type=_seconds, default=3600.0, metavar="TIME", help="limit of scrontab's job (1h)")
    parser.add_argument("--evidence", type=Path, default=Path("resilio-drills"), metavar="DIR",
                        help="where evidence and the log go (default: resilio-drills)")  # fmt: skip
    parser.add_argument("--install", action="store_true", help="write it, after a question")
    parser.add_argument("--yes", action="store_true", help="ask nothing")


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _seconds(value: str) -> float:
    """Return the seconds of 90, 90s, 10m, 2h."""
    unit = _UNITS.get(value[-1:], 0.0)
    try:
        found = float(value[:-1]) * unit if unit else float(value)
    except ValueError:
        found = math.nan
    if not 0.0 <= found <= MOST_S:
        raise argparse.ArgumentTypeError(f"{printable(value, 60)!r}: a time such as 90s, 10m or 2h is needed")
    return found
