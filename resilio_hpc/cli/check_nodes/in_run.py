"""``resilio check-nodes --run RUN``: orders a test of the nodes of a run, and waits for its result in the ledger."""

from __future__ import annotations

import argparse
import json
import time

from resilio_hpc.cli.common.given_order import GivenOrder
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import Fields
from resilio_hpc.core.ledger import Event
from resilio_hpc.events.event_text import words
from resilio_hpc.slurm.client.hostlist import compress
from resilio_hpc.slurm.runs import run_names

RESUMED_S = 5.0  # after the result, for ranks to go on
SHOWN = ("test_begun", "paused", "tested", "pause_ended")
_UNUSED = ("nodelist", "local", "budget", "slow_ratio", "policy", "address", "exclude_file", "dry_run")


def test(options: argparse.Namespace) -> int:
    """Order a test and show what becomes of it. Exit codes: 0 fine, 1 found, 3 cannot tell."""
    given = [name for name in _UNUSED if getattr(options, name)] + (["srun"] if options.srun else [])
    if given:
        raise UsageError(f"--{given[0].replace('_', '-')} is not for --run, which tests the run's own nodes")
    run = run_names.run_path(options.run)
    tested = _await(GivenOrder(run, "test", options.replace), options)
    f = Fields.of(tested.fields)
    if options.json:
        print(json.dumps(tested.fields), flush=True)
    elif options.print:
        lists = {"good": (), "bad": ("bad",), "slow": ("slow",), "named": ("bad", "slow")}
        print(compress([node for name in lists[options.print] for node in f.texts(name)]), flush=True)
    return {"fine": 0, "found": 1}.get(f.text("outcome"), 3)


def _await(order: GivenOrder, options: argparse.Namespace) -> Event:
    """Return the event with the result; show the others on the way. Raises ResilioError."""
    quiet, until = options.quiet or options.json or bool(options.print), 0.0
    result: Event | None = None
    pauses = False
    while result is None or (pauses and time.monotonic() < until):
        for event in order.look():
            if order.is_taken and event.kind in SHOWN and not quiet:
                print(words(event.kind, event.fields), flush=True)
            pauses = order.is_taken and (event.kind == "paused" or (pauses and event.kind != "pause_ended"))
            if order.is_of_this(event) and event.kind == "tested":
                result, until, order.is_answered = event, time.monotonic() + RESUMED_S, True
    return result
