"""``resilio report [RUN]``: where the time of a whole run went, over all jobs of its chain."""

from __future__ import annotations

import time
from collections.abc import Sequence

from resilio_hpc.cli.common import output_form, run_argument
from resilio_hpc.cli.common.parser import Parser

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
    output_form.add(parser, "everything, for programs: also each span of time")
    options = parser.parse_args(argv)
    output_form.check(options)
    path = run_argument.run_of(options)

    from resilio_hpc.report.chain.report_json import report_json
    from resilio_hpc.report.chain.report_text import report_lines
    from resilio_hpc.report.chain.run_report import read_report
    from resilio_hpc.report.page.page import page

    report = read_report(path, time.time())
    output_form.show(
        options, f"the report of run {report.run_id}", lambda: report_json(report), lambda: page(report),
        lambda width: report_lines(report, width),
    )  # fmt: skip
    return 0
