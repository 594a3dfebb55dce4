"""``resilio checkpoint RUN``: has a run that trains save now, and waits until that is durable."""

from __future__ import annotations

import getpass
import json
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from resilio_hpc.cli.common import run_argument
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.core import trusted_files
from resilio_hpc.core.errors import ResilioError, UsageError
from resilio_hpc.core.json_fields import Fields
from resilio_hpc.core.ledger import Event, LedgerReader
from resilio_hpc.events.event_text import words
from resilio_hpc.launch.rundir import user_orders
from resilio_hpc.launch.rundir.user_orders import UserOrder

_EXAMPLES = """examples:
  resilio checkpoint runs/large              wait until a step from now on is committed
  resilio checkpoint 4711 --no-wait          the run of job 4711; give the order, and go
  resilio checkpoint runs/large --json && scancel 4711

Exit codes: 0 committed (or ordered, with --no-wait), 1 not possible, or the run ended before.
"""
TAKEN_S = 60.0  # for the controller to take the order
LOOK_S = 0.2
SHOWN = ("checkpoint_ordered", "checkpoint_made")


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = Parser(
        prog="resilio checkpoint",
        description="Have a run save at the same step on all ranks, soon, and go on. Its loop is that of run.steps.",
        epilog=_EXAMPLES,
    )
    run_argument.add(parser)
    parser.add_argument("--no-wait", action="store_true", help="do not wait for the checkpoint")
    parser.add_argument("--json", action="store_true", help="for programs: the result, as in the ledger")
    options = parser.parse_args(argv)
    path = run_argument.run_of(options)
    if not (path / "run.json").exists():
        raise UsageError(f"{path} is no run directory (it has no run.json): name the one that resilio-launch names")
    path = trusted_files.run_directory(path)
    order = UserOrder("checkpoint", secrets.token_hex(8), getpass.getuser())
    try:
        reader = LedgerReader(path / "ledger")
        before = [event.kind for event in reader.read_new() if event.kind in ("launch", "launch_ends")]
        if before[-1:] == ["launch_ends"]:
            raise ResilioError(f"{path} does not run now")
        user_orders.write(path, order)
    except OSError as error:
        raise UsageError(f"{path}: the order cannot be given: {error.strerror}") from None
    if options.no_wait:
        print(json.dumps({"asked": order.mark}) if options.json else "ordered; resilio ledger tells what becomes of it")
        return 0
    made = _await(path, reader, order, quiet=options.json)
    if options.json:
        print(json.dumps(made.fields), flush=True)
    return 1 if Fields.of(made.fields).text("why") else 0


def _await(run: Path, reader: LedgerReader, order: UserOrder, quiet: bool) -> Event:
    """Return the event with the result; show what happens on the way. Raises ResilioError."""
    until: float | None = time.monotonic() + TAKEN_S
    while True:
        for event in reader.read_new():
            if event.kind in SHOWN and Fields.of(event.fields).text("asked") == order.mark:
                until = None
                if not quiet:
                    print(words(event.kind, event.fields), flush=True)
                if event.kind == "checkpoint_made":
                    return event
            elif event.kind == "launch_ends":
                raise ResilioError("the run ended before a step was committed")
        if until is not None and time.monotonic() > until:
            user_orders.remove(run, order.kind, order.mark)
            raise ResilioError(f"no controller took the order within {TAKEN_S:.0f} s: does {run} run now?")
        time.sleep(LOOK_S)
