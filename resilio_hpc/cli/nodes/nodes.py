"""``resilio nodes``: faults of nodes, remembered across jobs (see ``look`` and ``apply``)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from resilio_hpc.cli.common import run_argument
from resilio_hpc.cli.common.drain_options import EXIT_CODES
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.cli.nodes import apply, look
from resilio_hpc.prolog_epilog.base.reports import SPOOL
from resilio_hpc.slurm.node_faults.ledger import DIRECTORY_VARIABLE, SYSTEM

EXAMPLES = f"""examples:
  resilio nodes list                            scores of the nodes that failed your runs, and why
  resilio nodes list n17                        one node, with each fault
  resilio nodes exclude --nodes 8 -p gpu        what to avoid: sbatch --exclude=$(resilio nodes exclude --nodes 8) ...
  resilio nodes learn resilio-runs/1234         add what a run has seen (a launch under Slurm does so by itself)
  resilio nodes forget n17 --why "new board"    begin anew with a node
  resilio nodes report n17 --why "ECC errors"   on n17: ask root's daemon to check that node now

for administrators, on the controller:
  resilio nodes apply --dry-run                 which weights and drains would follow
  resilio nodes apply                           learn from Slurm, set weights, drain, and give back
  resilio nodes forget --system n17 --why "new board"

{EXIT_CODES}
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit codes: see EXIT_CODES."""
    options = _parser().parse_args(argv)
    return int(options.act(options))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="resilio nodes",
        description="Remembers which nodes failed, across jobs; old faults count less and less.",
        epilog=EXAMPLES,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    made = {}
    for name, act, text in (
        ("list", look.list_, "nodes with faults, the worst first"),
        ("exclude", look.exclude, "the nodes that a job had better avoid, as sbatch --exclude takes them"),
        ("learn", look.learn, "add the faults of nodes that a run has seen"),
        ("forget", look.forget, "forget the faults of nodes, once they are put right"),
        ("report", look.report, "ask root's daemon on this node to check it now"),
        ("apply", apply.apply, "from scores to Slurm: weights, and drains at the threshold (for administrators)"),
    ):
        made[name] = command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(act=act)
        command.add_argument("--json", action="store_true", help="for programs")
        if name == "report":
            continue
        ledger = command.add_mutually_exclusive_group()
        ledger.add_argument(
            "--ledger", type=Path, metavar="DIR",
            help=f"whose memory (default: ${DIRECTORY_VARIABLE}, else beside the runs in resilio-runs)"
            if name != "apply" else f"default: {SYSTEM}",
        )  # fmt: skip
        if name != "apply":
            ledger.add_argument("--system", action="store_true", help=f"the cluster's, in {SYSTEM}")
        if name in ("list", "exclude", "apply"):
            numbers = "values for slurm/node_faults/policy.toml's"
            command.add_argument("--policy", type=Path, metavar="FILE", help=numbers)
    made["list"].add_argument("nodes", nargs="*", metavar="NODE", help="default: all that have faults")
    made["exclude"].add_argument(
        "--nodes", type=int, default=1, metavar="N", help="how many the job needs (default: 1)"
    )
    made["exclude"].add_argument("-p", "--partition", default="", metavar="NAME", help="default: Slurm's default")
    run_argument.add(made["learn"])
    for name in ("forget", "report"):
        made[name].add_argument("nodes" if name == "forget" else "node", nargs="+" if name == "forget" else None,
                                metavar="NODE")  # fmt: skip
        made[name].add_argument("--why", required=True, metavar="TEXT", help="in a line")
    made["report"].add_argument("--spool", type=Path, default=SPOOL, metavar="DIR", help=f"default: {SPOOL}")
    for name in ("learn", "forget", "report"):
        made[name].add_argument("--dry-run", action="store_true", help="only say what would be written")
    apply.add_options(made["apply"])
    return parser
