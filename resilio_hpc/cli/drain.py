"""``resilio drain NODE…``: drain nodes for a reason with an owner, and never over another owner's drain."""

from __future__ import annotations

from collections.abc import Sequence

from resilio_hpc.cli.common.drain_options import EXIT_CODES, add_options, carry_out, names_of, writer
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.core.errors import UsageError
from resilio_hpc.slurm.drain.reason import BY_HAND, Finding

_EXAMPLES = """examples:
  resilio drain n3 --reason "fan is loud"
  resilio drain n[3-5] --check gpu.xid --reason "Xid 79 on GPU 3" --dry-run
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit codes: see EXIT_CODES."""
    parser = Parser(
        prog="resilio drain",
        description="Let no new job start on nodes; what runs there goes on. A node that is drained already, by an "
        "administrator or by Slurm itself, is left as it is. Needs the rights of a Slurm administrator.",
        epilog=_EXAMPLES + EXIT_CODES,
    )
    add_options(parser)
    parser.add_argument("--reason", required=True, metavar="TEXT", help="what was seen, in a line")
    parser.add_argument("--check", default=BY_HAND, metavar="ID", help=f"the check that failed (default: {BY_HAND})")
    parser.add_argument("--no-breaker", action="store_true", help="however many nodes have been drained lately")
    options = parser.parse_args(argv)
    if not options.reason.strip():
        raise UsageError("--reason must say something")
    finding = Finding(options.check, options.reason)
    names = names_of(options.nodes)
    drainer = writer(options, breaker=not options.no_breaker)
    return carry_out(names, lambda name: drainer.drain(name, finding), drainer, options.json)
