"""``resilio chain status | stop | extend``: a user's view of a run's chain, and orders for it."""

from __future__ import annotations

import argparse
import getpass
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from resilio_hpc.cli.ckpt.change import count
from resilio_hpc.cli.common import run_argument
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.core.terminal import local_time
from resilio_hpc.launch.chain import chain_control, chain_status
from resilio_hpc.launch.chain.chain_control import Outcome
from resilio_hpc.launch.chain.chain_status import ChainStatus, PartStatus
from resilio_hpc.launch.rundir import chain_order
from resilio_hpc.slurm.client.command_client import CommandClient
from resilio_hpc.slurm.submit.submission import own_environment

_EXAMPLES = """examples:
  resilio chain status /scratch/me/run     how its jobs stand and ended, what waits and for what
  resilio chain status 4711                the same, by the number of one of its jobs
  resilio chain stop 4711                  save, end, and start nothing more
  resilio chain extend 4711 --max 40       40 jobs in all; one more is submitted where the chain has ended
"""
_EXIT_CODES = (
    "exit codes: 0 done, or nothing to do; 1 Slurm did not answer or refused, nothing was changed; 2 a mistake in the "
    "command; 3 the order is recorded and holds, but Slurm did not answer: repeat it later"
)
_PHASES = {
    "running": "goes on",
    "stopping": "is being stopped",
    "waiting": "waits",
    "stopped": "was stopped",
    "ended": "has ended",
    "complete": "is complete",
    "unknown": "Slurm does not answer; what follows is from files alone",
}


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit codes: see _EXIT_CODES."""
    parser = Parser(
        prog="resilio chain",
        description="The chain of jobs that carry one run (resilio-launch --chain).",
        epilog=_EXAMPLES + _EXIT_CODES,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="status | stop | extend")
    for name, act, summary in (
        ("status", _status, "the jobs of the chain: states, times, why each ended, what waits and for what"),
        ("stop", _stop, "what runs saves and ends, what waits is cancelled, nothing more is submitted"),
        ("extend", _extend, "allow more jobs, take a stop back, submit one more where the chain has ended"),
    ):
        verb = verbs.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog=_EXAMPLES + _EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        verb.set_defaults(act=act)
        run_argument.add(verb, optional=name == "status")
        verb.add_argument("--json", action="store_true", help="for programs")
        if name != "status":
            verb.add_argument("--dry-run", action="store_true", help="say what would be done, and change nothing")
        if name == "extend":
            limits = verb.add_mutually_exclusive_group()
            limits.add_argument(
                "--max", type=count, metavar="N", help="jobs in the chain at most, those so far included"
            )
            limits.add_argument("--no-limit", action="store_true", help="as many jobs as it takes")
    options = parser.parse_args(argv)
    chosen: Callable[[argparse.Namespace], int] = options.act
    return chosen(options)


def _look(run_path: Path) -> ChainStatus:
    status = chain_status.status_of(str(run_path), chain_status.fetch(run_path, CommandClient()))
    if not status.parts:
        raise UsageError(f"{run_path} has no job of Slurm yet: there is no chain")
    return status


def _status(options: argparse.Namespace) -> int:
    status = _look(run_argument.directory_of(options))
    if options.json:
        print(msgspec.json.encode(status).decode(), flush=True)
    else:
        print("\n".join(lines(status)), flush=True)
    return 0 if status.answered else 1


def _stop(options: argparse.Namespace) -> int:
    run_path = run_argument.directory_of(options)
    outcome = chain_control.stop(run_path, lambda: _look(run_path), getpass.getuser(), time.time(), options.dry_run)
    return _tell(outcome, options.json)


def _extend(options: argparse.Namespace) -> int:
    run_path = run_argument.directory_of(options)
    limit = chain_order.NO_LIMIT if options.no_limit else options.max
    outcome = chain_control.extend(
        run_path, lambda: _look(run_path), getpass.getuser(), time.time(), own_environment(os.environ), limit,
        options.dry_run,
    )  # fmt: skip
    return _tell(outcome, options.json)


def _tell(outcome: Outcome, as_json: bool) -> int:
    if as_json:
        print(msgspec.json.encode(outcome).decode(), flush=True)
    else:
        print("\n".join(printable(line, 500) for line in outcome.said), flush=True)
    return 3 if outcome.result == "recorded" else 0


def lines(status: ChainStatus) -> list[str]:
    """Return the text for a person. Pure, except for the time zone."""
    limit = "no limit on its jobs" if status.limit is None else f"{status.limit} jobs at most"
    told = [f"chain of {printable(status.run_dir, 500)}: {_PHASES.get(status.phase, status.phase)} ({limit})"]
    if status.order.stopped:
        told.append(f"stopped by {printable(status.order.by) or 'its user'} at {_time(status.order.time)}")
    rows: list[tuple[str, ...]] = [("link", "job", "state", "began", "ended", "nodes", "steps", "")]
    rows += [_row(part) for part in status.parts]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    told += ["  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return told


def _row(part: PartStatus) -> tuple[str, ...]:
    began = _time(part.began) if part.began else f"by {_time(part.start_expected)}" if part.start_expected else "-"
    before, after = part.committed or (-1, -1)
    steps = "-" if part.committed is None else f"{_step(before)} to {_step(after)}" if after > before else _step(before)
    return (
        str(part.link), printable(part.part or part.job, 60), printable(part.state or "-", 60), began,
        _time(part.ended) if part.ended else "-",
        str(len(part.nodes) or "-"), steps, printable(part.why, 200),
    )  # fmt: skip


def _step(step: int) -> str:
    return "none" if step < 0 else str(step)


def _time(unix: float | None) -> str:
    return local_time(unix, "%m-%d %H:%M:%S")
