"""``resilio drill run NAME…`` on dev clusters."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time

from resilio_hpc.cli.common.confirm import confirmed
from resilio_hpc.core import terminal
from resilio_hpc.core.extras import is_installed
from resilio_hpc.devtools.devcluster.spec import HOST_SERIES
from resilio_hpc.drills import session
from resilio_hpc.drills.drill import DrillResult
from resilio_hpc.drills.drill_words import drill_of, slug
from resilio_hpc.drills.session import DoneDrill, DrillOrder


def main(options: argparse.Namespace) -> int:
    """Do the drills. Exit code 0 when all passed, 1 when one did not. Raises UsageError, ResilioError."""
    order = DrillOrder(
        drills=tuple(drill_of(name) for name in options.names),
        repeats=int(options.repeats),
        cluster=options.cluster,
        slurm=options.slurm or HOST_SERIES,
        torch=not options.no_torch and is_installed("torch"),
        evidence=options.evidence.absolute(),
    )
    session.check(order)
    if order.cluster and not confirmed(f"hurt the nodes of the dev cluster {order.cluster}?", options.yes):
        return 1
    results: list[DrillResult] = []

    def say(text: str) -> None:
        if not options.json:
            print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    def done(one: DoneDrill) -> None:
        results.append(one.result)
        if options.json:
            print(json.dumps(one.as_record()), file=terminal.raw(sys.stdout), flush=True)
        else:
            say(line(one))

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # a shell's background has SIGINT ignored
        signal.signal(number, signal.default_int_handler)  # so that the cluster is taken down
    session.perform(order, say, done)
    return 0 if all(result.passed for result in results) else 1


def line(one: DoneDrill) -> str:
    """Return what a drill came to, in a line."""
    result = one.result
    verdict = "passed" if result.passed else f"FAILED: {result.why}"
    recovery = f"recovered after {result.recovery_s:.2f} s" if result.recovery_s is not None else "no recovery"
    again = f"{result.repeated_steps} steps done again" if result.repeated_steps is not None else "steps unknown"
    return f"{slug(result.name)}: {verdict}; {recovery}; {again}; state {result.state}; evidence {one.evidence}"
