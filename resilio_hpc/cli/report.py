"""``resilio report [RUN]``: where the time of a whole run went, over all jobs of its chain."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from resilio_hpc.cli.common import run_argument
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.core import terminal
from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable

_EXAMPLES = """examples:
  resilio report                          the newest run here
  resilio report 4712 --html 4712.html    a page to look at, or to send: one file, which needs no network
  resilio report 4712 --json | jq '.by_cause | map_values(.wall_us / 1e6)'

exit codes: 0 whatever became of the run; 1 the page could not be written; 2 a mistake in the command, or no such run
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit code 0 whatever the run's state; 2 without a run."""
    parser = Parser(
        prog="resilio report",
        description="Goodput and ETTR of a run over all its jobs: every second with its cause, and the ledger lines "
        "behind it;\nrecoveries, checkpoints, cost, and what to change. Needs the run directory only.",
        epilog=_EXAMPLES,
    )
    run_argument.add(parser, optional=True)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--html", type=Path, metavar="FILE", help="write it as a page, in one file")
    form.add_argument("--json", action="store_true", help="everything, for programs: also each span of time")
    options = parser.parse_args(argv)
    if options.html is not None and options.html.is_dir():
        raise UsageError(f"--html {printable(str(options.html), 500)} is a directory: name a file in it")
    path = run_argument.run_of(options)

    from resilio_hpc.report.chain.run_report import read_report

    report = read_report(path, time.time())
    if options.json:
        from resilio_hpc.report.chain.report_json import report_json

        print(report_json(report), file=terminal.raw(sys.stdout), flush=True)
        return 0
    if options.html is not None:
        from resilio_hpc.report.page.page import page

        write_atomic(options.html, page(report).encode(), durable=False)
        print(f"the report of run {report.run_id} is in {printable(str(options.html), 500)}", flush=True)
        return 0
    from resilio_hpc.report.chain.report_text import report_lines

    print("\n".join(report_lines(report, min(terminal.columns(80), 100))), flush=True)
    return 0
