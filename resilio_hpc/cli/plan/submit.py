"""``resilio plan … --submit SCRIPT``: goes down the ranking until Slurm takes a choice. RES-21."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from resilio_hpc.autoparallel.search.choice import Choice
from resilio_hpc.autoparallel.search.evaluate import Attempt, Evaluator, WaitLimits
from resilio_hpc.cli.plan.job import job_of
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.slurm.submit.trial import Trials

NONE_TAKEN = 3
HELP = """\
--submit SCRIPT hands the best choice to Slurm. SCRIPT is a training script (train.py, which resilio-launch then runs),
a template of resilio submit --list, or a batch script of your own. Nodes, GPUs of each node and partition are the
choice's; other options of sbatch are given by --set KEY=VALUE (resilio submit --explain multi-node lists them).
The job finds RESILIO_TP, RESILIO_PP, RESILIO_DP, RESILIO_MICRO_BATCH … in its environment; in what stands behind --
the words {tp} {pp} {dp} {cp} {ep} {vpp} {zero} {micro_batch} {global_batch} {accumulation} {recompute} {world_size}
{nodes} {ranks_per_node} become numbers. Spare nodes of a template (spares=N) are asked for beside those of the choice.
Each choice is first tested (sbatch --test-only). A job that does not start
since its nodes were drained or taken meanwhile is cancelled, and the next choice has its turn.

exit codes with --submit:
  0  a job has started, or waits for a start within --max-wait (--dry-run: would be submitted)
  1  Slurm did not answer, or takes no job of yours
  2  a mistake in the command line
  3  Slurm could start none of the choices
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``--submit``."""
    group = parser.add_argument_group("submitting")
    group.add_argument("--submit", metavar="SCRIPT", help="the best choice that Slurm takes (see below)")
    group.add_argument("--max-wait", type=float, metavar="SECONDS", help="how far ahead the start may be (default: 0)")
    group.add_argument(
        "--settle", type=float, metavar="SECONDS",
        help=f"how long Slurm may take to start a job that has room (default: {WaitLimits.settle_s:g})",
    )  # fmt: skip
    group.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the job: time=2:00:00")
    group.add_argument("--dry-run", action="store_true", help="with --submit: test the choices, submit nothing")


def check_options(options: argparse.Namespace) -> None:
    """Refuse wrong options, whatever the search finds. Raises UsageError."""
    if options.submit is None:
        for name in ("max_wait", "settle", "set", "dry_run"):
            if getattr(options, name):
                raise UsageError(f"--{name.replace('_', '-')} goes with --submit SCRIPT")
        return
    if options.emit:
        raise UsageError("one of --submit and --emit, not both")
    patience_of(options)


def patience_of(options: argparse.Namespace) -> WaitLimits:
    """Return how long to wait for a start. Raises UsageError."""
    given = {f"{name}_s": getattr(options, name) for name in ("max_wait", "settle")}
    for name, value in given.items():
        if value is not None and not 0 <= value < math.inf:
            raise UsageError(f"--{name[:-2].replace('_', '-')} {value:g}: seconds, 0 or more")
    return WaitLimits(**{name: value for name, value in given.items() if value is not None})


def submit(choices: Sequence[Choice], options: argparse.Namespace, command: Sequence[str]) -> int:
    """Submit the first of ``choices``, best first, that Slurm takes; return the exit code.

    ``command``: behind ``--``.
    """
    prepare = job_of(options.submit, options.set, command, os.environ)
    patience = patience_of(options)
    taken = Evaluator(prepare, teller(options.json), Trials(), patience).run(choices, options.dry_run)
    if taken is None:
        why = f"Slurm could start none of the {len(choices)} choices"
        hint = "" if options.max_wait else " now (--max-wait SECONDS accepts a later start)"
        print(f"resilio: {why}{hint}", file=sys.stderr)
        return NONE_TAKEN
    return 0


def teller(as_json: bool) -> Callable[[Attempt], None]:
    """Return a function that prints each attempt: a line for people, or a line of JSON."""

    def tell(attempt: Attempt) -> None:
        if as_json:
            print(json.dumps({"v": 1, "time": round(time.time(), 3), **asdict(attempt)}), flush=True)
            return
        shape = f"{attempt.nodes} x {attempt.gpus_per_node}" + f" in {attempt.partition}" * bool(attempt.partition)
        event = attempt.event + f" as job {attempt.job}" * (attempt.event == "submitted")
        print(f"choice {attempt.rank}: {shape}, {attempt.layout}: {event}: {printable(attempt.why, 400)}", flush=True)

    return tell
