"""``resilio health``: its commands and their options.

A command's module is imported only when it is asked for, since hooks start these commands.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.prolog_epilog.base.check import CONTEXTS
from resilio_hpc.prolog_epilog.run.cached_verdict import DIRECTORY

EXAMPLES = """examples:
  resilio health run                        all checks of a running node, and what they found
  resilio health run disk-space gpu-ecc     only these
  resilio health run --context start        what is looked at before ranks are started (as any user)
  resilio health list                       the checks, when they run, what a failure does
  resilio health explain gpu-xid            one check: thresholds, source, reason in Slurm
  resilio health why n17                    why Slurm or a verdict of ours keeps jobs off a node
  resilio health baseline                   learn what is normal on this node (as root); see docs/health.md
  resilio health baseline ib-rate           anew for one check, after a repair or an upgrade
  resilio health baseline --compare DIR     which nodes' baselines differ from the others'
  resilio health clear gpu-xid              what it found is put right: begin anew (as root, on the node)
  resilio health watch                      the node daemon (as root)
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit code 0; 1 for a finding that keeps jobs off the node; 2 after a mistake of the user."""
    options = _parser().parse_args(argv)
    module, _, name = options.act.partition(".")
    return int(getattr(importlib.import_module(f"resilio_hpc.cli.health.{module}"), name)(options))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="resilio health",
        description="Health checks of this node, for Slurm's prolog and for people.",
        epilog=EXAMPLES,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    made = {}
    for name, act, text in (
        ("run", "run.run", "run checks now"),
        ("list", "look.list_", "the checks"),
        ("explain", "look.explain", "what a check looks at, its thresholds and where they come from"),
        ("why", "look.why", "why jobs are kept off a node"),
        ("baseline", "baseline.baseline", "learn what is normal on this node, for checks that compare with it"),
        ("clear", "run.clear", "forget what checks found until now, once it is put right"),
        ("watch", "watch.watch", "look for ever, and keep the verdict that prologs read"),
        ("epilog", "epilog.epilog", "remove what a job left here (for the epilog hook)"),
    ):
        made[name] = command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(act=act)
        command.add_argument("--json", action="store_true", help="for programs")
        command.add_argument(
            "--site", type=Path, metavar="FILE", help="the site's changes (default: /etc/resilio/health.toml if there)"
        )
        if name not in ("list", "explain"):
            command.add_argument(
                "--directory", type=Path, default=DIRECTORY, metavar="DIR", help=f"where verdicts are ({DIRECTORY})"
            )
    run = made["run"]
    run.add_argument("checks", nargs="*", metavar="CHECK", help="default: those of the context")
    run.add_argument("--context", choices=CONTEXTS, default="health", help="health also runs those of an idle node")
    run.add_argument("--write", action="store_true", help="keep the verdict for prologs, as the health check does")
    run.add_argument("--quiet", action="store_true", help="print nothing but errors")
    learn = made["baseline"]
    learn.add_argument("checks", nargs="*", metavar="CHECK", help="only these anew (default: all that compare)")
    learn.add_argument("--dry-run", action="store_true", help="only say what would be normal from now on")
    learn.add_argument("--forget", action="store_true", help="remove this node's baseline")
    learn.add_argument(
        "--compare", type=Path, metavar="DIR", help="look at the baselines of many nodes in a directory, in groups"
    )
    for name in ("explain", "clear"):
        made[name].add_argument("check", metavar="CHECK")
    made["why"].add_argument("node", nargs="?", default="", metavar="NODE", help="default: this one")
    made["watch"].add_argument("--once", action="store_true", help="one look, then end")
    made["watch"].add_argument(
        "--drain", choices=("off", "observe", "act"), default="off",
        help="drain this node in Slurm where a check asks for it, and end that when it passes; observe: only say so",
    )  # fmt: skip
    made["watch"].add_argument(
        "--faults", type=Path, metavar="DIR", help="remember there what is found, across reboots (resilio nodes)"
    )
    made["watch"].add_argument(
        "--reports", type=Path, metavar="DIR", help="check anew when users ask for it there (resilio nodes report)"
    )
    made["watch"].add_argument("--policy", type=Path, metavar="FILE", help="numbers for drain_policy.toml's")
    made["epilog"].add_argument("--dry-run", action="store_true", help="only say what would be removed")
    return parser
