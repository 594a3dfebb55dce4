"""``resilio undrain NODE…``: end our own drains, and nobody else's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from resilio_hpc.cli.drain_options import EXIT_CODES, Parser, add_options, carry_out, names_of, writer

_EXAMPLES = """examples:
  resilio undrain n3
  resilio undrain n[3-5] --check gpu.xid
  resilio undrain --kill-task-failed n7
"""


def main(argv: Sequence[str]) -> int:
    """Exit codes: see EXIT_CODES."""
    parser = Parser(
        prog="resilio undrain",
        description="End the drains that resilio_hpc made. Those of administrators and of Slurm itself stay, and so "
        "does a reason of ours that somebody has edited. A node that is DOWN stays DOWN.",
        epilog=_EXAMPLES + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    which_drain = parser.add_mutually_exclusive_group()
    which_drain.add_argument("--check", metavar="ID", help="only what this check holds (default: all of ours)")
    which_drain.add_argument(
        "--kill-task-failed",
        action="store_true",
        help='instead end a drain that Slurm made itself ("Kill task failed"): look first whether its processes ended',
    )
    options = parser.parse_args(argv)
    names = names_of(options.nodes)
    drainer = writer(options)
    if options.kill_task_failed:
        return carry_out(names, drainer.resume_slurms_own, drainer, options.json)
    return carry_out(names, lambda name: drainer.undrain(name, options.check), drainer, options.json)
