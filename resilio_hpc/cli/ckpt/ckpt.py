"""``resilio ckpt``: its commands and their options (see ``look``, ``change`` and ``formats``)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from resilio_hpc.ckpt.convert.export import FORMATS
from resilio_hpc.cli.ckpt import change, look
from resilio_hpc.cli.common import run_argument
from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.cli.common.steps import find_checkpoints
from resilio_hpc.slurm.runs import run_names

EXAMPLES = """examples:
  resilio ckpt ls runs/llama                  the steps of a run, or of a directory of checkpoints
  resilio ckpt show checkpoints               the tensors of the newest step
  resilio ckpt show checkpoints 300 --rank 2 --tree
  resilio ckpt show checkpoints 300 --h5      make checkpoint.h5: the step as one file for any HDF5 program
  resilio ckpt verify checkpoints             read every byte; exit code 1 if one is not as it was written
  resilio ckpt diff checkpoints 200 300       what has changed; exit code 1 if anything has
  resilio ckpt copy runs/llama archive 300    verified; what is there counts only when all of it is
  resilio ckpt prune checkpoints --keep-checkpoints 5 --keep-every 1000 --keep-gb 500 --dry-run
  resilio ckpt export runs/llama model.safetensors       the newest step, put together from what its processes saved
  resilio ckpt export checkpoints rank2.pt 300 --rank 2  what one process saved
  resilio ckpt export checkpoints dcp/ 300               a folder of torch.distributed.checkpoint
  resilio ckpt import model.safetensors checkpoints 0    from where a Checkpointer begins
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit code 0; 1 where something is damaged or differs; 2 where there is nothing to look at."""
    options = _parser().parse_args(argv)
    if options.act is not change.import_:
        options.directory = find_checkpoints(_named(options.directory))
    return int(options.act(options))


def _named(directory: Path | None) -> Path:
    """Return the directory that is meant; without one, the newest run's. Raises UsageError."""
    return run_argument.newest_run() if directory is None else run_names.run_path(str(directory))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="resilio ckpt",
        description="Look at checkpoints, copy, remove and convert them; import and torch's own formats need torch.",
        epilog=EXAMPLES,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    made = {}
    for name, act, text in (
        ("ls", look.ls, "the committed steps, the newest last"),
        ("show", look.show, "the tensors of a step"),
        ("verify", look.verify, "read steps whole and compare all checksums"),
        ("diff", change.diff, "what differs between two steps, by their checksums"),
        ("copy", change.copy, "copy steps into another directory of checkpoints, verified"),
        ("prune", change.prune, "remove all steps but those to keep; the newest always stays"),
        ("export", change.export, "write a step as a torch.save file, as safetensors, or as a DCP folder"),
    ):
        made[name] = command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(act=act)
        without = " (default: the newest run here)" if name == "ls" else ""
        command.add_argument(
            "directory", type=Path, nargs="?" if without else None, metavar="DIR",
            help=f"directory of checkpoints, or a run: its directory, job, or id{without}",
        )  # fmt: skip
        command.add_argument("--json", action="store_true", help="for programs")
    made["show"].add_argument("step", type=int, nargs="?", metavar="STEP", help="default: the newest")
    made["show"].add_argument("--rank", type=int, default=0, metavar="R", help="whose part (0)")
    instead = made["show"].add_mutually_exclusive_group()
    instead.add_argument("--tree", action="store_true", help="the plain values instead of the tensors, as JSON")
    instead.add_argument(
        "--h5", action="store_true", help="make checkpoint.h5 in the step's directory: all of it as one HDF5 file"
    )
    made["verify"].add_argument("steps", type=int, nargs="*", metavar="STEP", help="default: all")
    made["diff"].add_argument("first", type=int, metavar="STEP")
    made["diff"].add_argument("second", type=int, metavar="STEP")
    made["diff"].add_argument("--with", dest="other", type=Path, metavar="DIR2", help="where the second step is (DIR)")
    made["copy"].add_argument("target", type=Path, metavar="TARGET", help="directory of checkpoints, made if need be")
    made["copy"].add_argument("steps", type=int, nargs="*", metavar="STEP", help="default: the newest")
    for name, kind, metavar, text in (
        ("--keep-checkpoints", change.count, "N", "the N steps committed last"),
        ("--keep-every", change.count, "K", "also steps that K divides"),
        ("--keep-hours", change.amount, "H", "of those, none committed more than H hours ago"),
        ("--keep-gb", change.amount, "G", "of those, as many as fit into G gigabytes; the oldest go first"),
    ):
        required, default = name == "--keep-checkpoints", 0 if name == "--keep-every" else None
        made["prune"].add_argument(name, type=kind, required=required, default=default, metavar=metavar, help=text)
    export = made["export"]
    export.add_argument("target", type=Path, metavar="TARGET", help="file or folder to make")
    export.add_argument("step", type=int, nargs="?", metavar="STEP", help="default: the newest")
    export.add_argument("--rank", type=int, metavar="R", help="only what this process saved, and its parts of tensors")
    export.add_argument("--overwrite", action="store_true", help="replace TARGET, once all of it is there")
    made["import"] = import_ = _import_parser(commands)
    for command in (export, import_):
        command.add_argument("--format", choices=FORMATS, help="default: what the name says (.pt, .pth, .bin: torch)")
    for name in ("copy", "prune", "export", "import"):
        made[name].add_argument("--dry-run", action="store_true", help="only say what would be done")
    return parser


def _import_parser(commands: Any) -> Parser:
    text = "make a step of such a file or folder; nothing in it is run"
    command: Parser = commands.add_parser("import", help=text, description=text)
    command.set_defaults(act=change.import_)
    command.add_argument(
        "source", type=Path, metavar="SOURCE", help="file of torch.save or safetensors, index of several, or DCP folder"
    )
    command.add_argument("target", type=Path, metavar="DIR", help="directory of checkpoints, or of a run")
    command.add_argument("step", type=int, metavar="STEP", help="the number that it gets")
    command.add_argument(
        "--layout", choices=("replicated", "own"), default="replicated", help="that of the Checkpointer (replicated)"
    )
    command.add_argument("--json", action="store_true", help="for programs")
    return command
