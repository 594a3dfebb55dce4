"""``resilio ckpt``: its commands and their options (see ``ckpt_look`` and ``ckpt_change``)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from resilio_hpc.cli import ckpt_change, ckpt_look
from resilio_hpc.cli.ckpt_common import find_checkpoints

EXAMPLES = """examples:
  resilio ckpt ls runs/llama                  the steps of a run, or of a directory of checkpoints
  resilio ckpt show checkpoints               the tensors of the newest step
  resilio ckpt show checkpoints 300 --rank 2 --tree
  resilio ckpt verify checkpoints             read every byte; exit code 1 if one is not as it was written
  resilio ckpt diff checkpoints 200 300       what has changed; exit code 1 if anything has
  resilio ckpt copy runs/llama archive 300    verified; what is there counts only when all of it is
  resilio ckpt prune checkpoints --keep 5 --keep-every 1000 --max-age 30d --dry-run
"""


def main(argv: Sequence[str]) -> int:
    """Exit code 0; 1 where something is damaged or differs; 2 where there is nothing to look at."""
    options = _parser().parse_args(argv)
    options.directory = find_checkpoints(options.directory)
    return int(options.act(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="resilio ckpt",
        description="Look at checkpoints, copy and remove them; from their files alone, without torch or h5py.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    made = {}
    for name, act, text in (
        ("ls", ckpt_look.ls, "the committed steps, the newest last"),
        ("show", ckpt_look.show, "the tensors of a step"),
        ("verify", ckpt_look.verify, "read steps whole and compare all checksums"),
        ("diff", ckpt_change.diff, "what differs between two steps, by their checksums"),
        ("copy", ckpt_change.copy, "copy steps into another directory of checkpoints, verified"),
        ("prune", ckpt_change.prune, "remove all steps but those to keep; the newest always stays"),
    ):
        made[name] = command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(act=act)
        command.add_argument("directory", type=Path, metavar="DIR", help="directory of checkpoints, or of a run")
        command.add_argument("--json", action="store_true", help="for programs")
    made["show"].add_argument("step", type=int, nargs="?", metavar="STEP", help="default: the newest")
    made["show"].add_argument("--rank", type=int, default=0, metavar="R", help="whose part (0)")
    made["show"].add_argument("--tree", action="store_true", help="the plain values instead of the tensors, as JSON")
    made["verify"].add_argument("steps", type=int, nargs="*", metavar="STEP", help="default: all")
    made["diff"].add_argument("first", type=int, metavar="STEP")
    made["diff"].add_argument("second", type=int, metavar="STEP")
    made["diff"].add_argument("--with", dest="other", type=Path, metavar="DIR2", help="where the second step is (DIR)")
    made["copy"].add_argument("target", type=Path, metavar="TARGET", help="directory of checkpoints, made if need be")
    made["copy"].add_argument("steps", type=int, nargs="*", metavar="STEP", help="default: the newest")
    prune = made["prune"]
    prune.add_argument("--keep", type=ckpt_change.count, required=True, metavar="N", help="the N steps committed last")
    prune.add_argument("--keep-every", type=ckpt_change.count, default=0, metavar="K", help="also steps that K divides")
    prune.add_argument("--max-age", type=ckpt_change.age, metavar="AGE", help="of those, none older, as 12h, 7d or 4w")
    for name in ("copy", "prune"):
        made[name].add_argument("--dry-run", action="store_true", help="only say what would be done")
    return parser
