"""``resilio check-nodes --run RUN``: orders a test of the nodes of a run, and waits for its result in the ledger."""

from __future__ import annotations

import argparse
import getpass
import json
import secrets
import time
from pathlib import Path

from resilio_hpc.core.errors import ResilioError, UsageError
from resilio_hpc.core.json_fields import Fields
from resilio_hpc.core.ledger import Event, LedgerReader
from resilio_hpc.events.event_text import words
from resilio_hpc.launch.rundir import user_orders
from resilio_hpc.launch.rundir.user_orders import UserOrder
from resilio_hpc.slurm.client.hostlist import compress
from resilio_hpc.slurm.runs import run_names

TAKEN_S = 60.0  # for the controller to take the order
RESUMED_S = 5.0  # after the result, for ranks to go on
LOOK_S = 0.2
SHOWN = ("test_begun", "paused", "tested", "pause_ended")
_UNUSED = ("nodelist", "local", "budget", "slow_ratio", "policy", "address", "exclude_file", "dry_run")


def test(options: argparse.Namespace) -> int:
    """Order a test and show what becomes of it. Exit codes: 0 fine, 1 found, 3 cannot tell."""
    given = [name for name in _UNUSED if getattr(options, name)] + (["srun"] if options.srun else [])
    if given:
        raise UsageError(f"--{given[0].replace('_', '-')} is not for --run, which tests the run's own nodes")
    run = run_names.run_path(options.run)
    order = UserOrder("test", secrets.token_hex(8), getpass.getuser(), options.replace)
    try:
        reader = LedgerReader(run / "ledger")
        reader.read_new()  # what is older is no answer
        user_orders.write(run, order)
    except OSError as error:
        raise UsageError(f"{run}: the order cannot be given: {error.strerror}") from None
    tested = _await(run, reader, order, options)
    f = Fields.of(tested.fields)
    if options.json:
        print(json.dumps(tested.fields), flush=True)
    elif options.print:
        lists = {"good": (), "bad": ("bad",), "slow": ("slow",), "named": ("bad", "slow")}
        print(compress([node for name in lists[options.print] for node in f.texts(name)]), flush=True)
    return {"fine": 0, "found": 1}.get(f.text("outcome"), 3)


def _await(run: Path, reader: LedgerReader, order: UserOrder, options: argparse.Namespace) -> Event:
    """Return the event with the result; show the others on the way. Raises ResilioError."""
    quiet, until, begun = options.quiet or options.json or bool(options.print), time.monotonic() + TAKEN_S, False
    result: Event | None = None
    pauses = False
    while True:
        for event in reader.read_new():
            mine = Fields.of(event.fields).text("asked") == order.mark
            begun = begun or mine
            if begun and event.kind in SHOWN and not quiet:
                print(words(event.kind, event.fields), flush=True)
            pauses = begun and (event.kind == "paused" or (pauses and event.kind != "pause_ended"))
            if mine and event.kind == "tested":
                result, until = event, time.monotonic() + RESUMED_S
            elif event.kind == "launch_ends" and result is None:
                raise ResilioError("the run ended before the test did")
        if result is not None and (not pauses or time.monotonic() > until):
            return result
        if not begun and time.monotonic() > until:
            user_orders.remove(run, order.kind, order.mark)
            raise ResilioError(f"no controller took the order within {TAKEN_S:.0f} s: does {run} run now?")
        time.sleep(LOOK_S)
