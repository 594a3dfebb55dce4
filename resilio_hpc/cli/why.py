"""``resilio why [RUN]``: what broke in a run, how sure that is, what was done, and how it stands, in one paragraph."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Sequence

from resilio_hpc.cli.common import run_argument
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.core import terminal

WIDTH = 80  # also of a file or a pipe, which have none
_EXAMPLES = """examples:
  resilio why                     the newest run here
  resilio why 4712                the run of job 4712
  resilio why 4712 --json | jq -r '.broke.place, .to_do'

exit codes: 0 whatever became of the run; 2 a mistake in the command, or no such run
See also: resilio logs RUN --first-error (the traceback), resilio diagnose (a cause from logs, also of other programs).
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit code 0 whatever the run's state; 2 without a run."""
    parser = Parser(
        prog="resilio why",
        description="Why a run is where it is: what broke last and how sure that is, how many echoes were folded,\n"
        "what was done, how many steps that cost, and how the run stands. Needs the run directory only.",
        epilog=_EXAMPLES,
    )
    run_argument.add(parser, optional=True)
    parser.add_argument("--json", action="store_true", help="the same and its parts, for programs")
    options = parser.parse_args(argv)
    path = run_argument.run_of(options)

    from resilio_hpc.report.chain.why import read_why, why_object

    found = read_why(path, time.time())
    if options.json:
        print(json.dumps(why_object(found), indent=1), file=terminal.raw(sys.stdout), flush=True)
        return 0
    print(textwrap.fill(found.text, max(40, min(terminal.columns(WIDTH), WIDTH)), break_on_hyphens=False), flush=True)
    return 0
