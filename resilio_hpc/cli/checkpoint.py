"""``resilio checkpoint RUN``: has a run that trains save now, and waits until that is durable."""

from __future__ import annotations

import json
from collections.abc import Sequence

from resilio_hpc.cli.common import run_argument
from resilio_hpc.cli.common.given_order import GivenOrder
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.core.json_fields import Fields
from resilio_hpc.events.event_text import words

_EXAMPLES = """examples:
  resilio checkpoint runs/large              wait until a step from now on is committed
  resilio checkpoint 4711 --no-wait          the run of job 4711; give the order, and go
  resilio checkpoint runs/large --json && scancel 4711

Exit codes: 0 committed (or ordered, with --no-wait), 1 not possible, or the run ended before.
"""


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
    order = GivenOrder(run_argument.directory_of(options), "checkpoint")
    if options.no_wait:
        print(json.dumps({"asked": order.mark}) if options.json else "ordered; resilio ledger tells what becomes of it")
        return 0
    while True:
        for event in filter(order.is_of_this, order.look()):
            if not options.json:
                print(words(event.kind, event.fields), flush=True)
            if event.kind == "checkpoint_made":
                if options.json:
                    print(json.dumps(event.fields), flush=True)
                return 1 if Fields.of(event.fields).text("why") else 0
