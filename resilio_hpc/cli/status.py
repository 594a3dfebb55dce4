"""``resilio status [RUN]``: the state of a run, from its files alone (on any node that sees the directory)."""

from __future__ import annotations

import time
from collections.abc import Sequence

from resilio_hpc.cli.common import run_argument
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.core import terminal
from resilio_hpc.report.overview import RunReader


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit code 0 whatever the run's state; 2 without a run."""
    parser = Parser(
        prog="resilio status",
        description="How a run stands: nodes, ranks, step, last committed checkpoint, faults, goodput, verdict. "
        "Needs the run directory only, so it works from a login node and after the run.",
    )
    run_argument.add(parser, optional=True)
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    options = parser.parse_args(argv)
    overview = RunReader(run_argument.run_of(options)).overview(time.time())
    if options.json:
        from resilio_hpc.report.as_json import overview_json

        print(overview_json(overview), flush=True)
        return 0
    from resilio_hpc.report.screen import screen

    console = terminal.console(highlight=False)
    if console.is_terminal:
        console.print(screen(overview, height=10_000, width=console.width))
        return 0
    console = terminal.console(highlight=False, width=200)  # a file or a pipe has no width, so nothing is cut
    with console.capture() as captured:
        console.print(screen(overview, height=10_000, width=console.width))
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)
    return 0
