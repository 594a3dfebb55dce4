"""``resilio ckpt ls | show | verify``: what checkpoints there are, what is in them, and whether they are as written."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from resilio_hpc.ckpt import catalogue
from resilio_hpc.ckpt.records import Manifest, TensorRecord
from resilio_hpc.ckpt.shard_reader import ShardReader
from resilio_hpc.ckpt.verify import Damage, size_of, verify_step
from resilio_hpc.core.errors import CheckpointError, UsageError
from resilio_hpc.core.json_fields import printable

EXAMPLES = """examples:
  resilio ckpt ls runs/llama                  the steps of a run, or of a directory of checkpoints
  resilio ckpt show checkpoints               the tensors of the newest step
  resilio ckpt show checkpoints 300 --rank 2 --tree
  resilio ckpt verify checkpoints             read every byte; exit code 1 if one is not as it was written
"""


def main(argv: Sequence[str]) -> int:
    """Exit code 0; 1 where something is damaged; 2 where there is nothing to look at."""
    options = _parser().parse_args(argv)
    options.directory = _find(options.directory)
    return int(options.act(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="resilio ckpt",
        description="Look at checkpoints, from their files alone. Nothing is ever changed.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, act, text in (
        ("ls", _ls, "the committed steps, the newest last"),
        ("show", _show, "the tensors of a step"),
        ("verify", _verify, "read steps whole and compare all checksums"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(act=act)
        command.add_argument("directory", type=Path, metavar="DIR", help="directory of checkpoints, or of a run")
        command.add_argument("--json", action="store_true", help="for programs")
        if name == "show":
            command.add_argument("step", type=int, nargs="?", metavar="STEP", help="default: the newest")
            command.add_argument("--rank", type=int, default=0, metavar="R", help="whose part (0)")
            command.add_argument("--tree", action="store_true", help="the plain values instead of the tensors, as JSON")
        if name == "verify":
            command.add_argument("steps", type=int, nargs="*", metavar="STEP", help="default: all")
    return parser


def _find(directory: Path) -> Path:
    if (directory / "run.json").is_file():
        return directory / "checkpoints"
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory")
    return directory


def _manifest(directory: Path, step: int) -> Manifest:
    try:
        return catalogue.manifest_of(directory, step)
    except FileNotFoundError:
        steps = ", ".join(map(str, catalogue.committed_steps(directory))) or "none"
        raise UsageError(f"there is no step {step} in {directory}; committed: {steps}") from None
    except OSError as error:
        raise CheckpointError(f"step {step}: {error}") from error


# -- ls ----------------------------------------------------------------------------------------------------------------


def _ls(options: argparse.Namespace) -> int:
    found, damaged = catalogue.committed(options.directory), catalogue.damaged_steps(options.directory)
    rows = [_summary(options.directory, manifest) for manifest in found]
    if options.json:
        print(json.dumps({"steps": rows, "damaged": {str(step): why for step, why in damaged.items()}}, indent=1))
        return 1 if damaged else 0
    if not rows and not damaged:
        print(f"no checkpoint in {options.directory} yet", file=sys.stderr)
    lines: list[tuple[str, ...]] = [("step", "committed", "size", "ranks", "nodes", "layout", "epoch", "round")]
    for row in rows:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["committed"]))
        size = size_text(row["size_bytes"])
        rest = [row[name] for name in ("ranks", "nodes", "layout", "epoch", "round")]
        lines.append(tuple(map(str, (row["step"], when, size, *rest))))
    _print_columns(lines if rows else [])
    for step, why in damaged.items():
        print(f"step {step} is damaged: {printable(why, 300)}")
    return 1 if damaged else 0


def _summary(directory: Path, manifest: Manifest) -> dict[str, Any]:
    path = catalogue.step_directory(directory, manifest.step) / catalogue.MANIFEST
    return {
        "step": manifest.step,
        "committed": path.stat().st_mtime,
        "size_bytes": size_of(manifest),
        "ranks": manifest.world_size,
        "nodes": len(manifest.shards),
        "layout": manifest.layout,
        "epoch": manifest.epoch,
        "round": manifest.round,
    }


# -- show --------------------------------------------------------------------------------------------------------------


def _show(options: argparse.Namespace) -> int:
    step = options.step
    if step is None:
        steps = catalogue.committed_steps(options.directory)
        if not steps:
            raise UsageError(f"there is no committed step in {options.directory}")
        step = steps[-1]
    manifest = _manifest(options.directory, step)
    try:
        shard, rank = manifest.shard_of(options.rank)
    except KeyError:
        raise UsageError(f"step {step} has ranks 0 to {manifest.world_size - 1}, not {options.rank}") from None
    try:
        with ShardReader(catalogue.step_directory(options.directory, step), shard) as reader:
            table = reader.table(rank)
            tree = reader.tree(rank, table)
    except OSError as error:
        raise CheckpointError(f"step {step}: {error}") from error
    if options.tree:
        print(json.dumps(json.loads(tree), indent=1) if options.json or sys.stdout.isatty() else tree.decode("ascii"))
        return 0
    tensors = [_tensor(record) for record in table.tensors]
    if options.json:
        about = {**_summary(options.directory, manifest), "rank": options.rank, "file": shard.file, "tensors": tensors}
        print(json.dumps(about, indent=1))
        return 0
    where = f"rank {options.rank} of {manifest.world_size}, {shard.file}"
    print(f"step {step}, {where}: {len(tensors)} tensors, {size_text(sum(t.size_bytes for t in table.tensors))}")
    if any(not tensor["here"] for tensor in tensors):
        print("  the bytes of what is marked * are with another rank, which holds the same")
    _print_columns(
        [
            (printable(t.path, 200), t.dtype, _shape(t), size_text(t.size_bytes) + ("" if t.offset >= 0 else " *"))
            for t in table.tensors
        ]
    )
    return 0


def _tensor(record: TensorRecord) -> dict[str, Any]:
    """For ``--json``."""
    about = {"path": record.path, "dtype": record.dtype, "shape": list(record.shape), "size_bytes": record.size_bytes}
    if record.slab is not None:
        about |= {"global_shape": list(record.slab.global_shape), "start": list(record.slab.start)}
    return about | {"here": record.offset >= 0}


def _shape(record: TensorRecord) -> str:
    if record.slab is None:
        return f"{list(record.shape)}"
    return f"{list(record.shape)} from {list(record.slab.start)} of {list(record.slab.global_shape)}"


# -- verify ------------------------------------------------------------------------------------------------------------


def _verify(options: argparse.Namespace) -> int:
    known = sorted({*catalogue.committed_steps(options.directory), *catalogue.damaged_steps(options.directory)})
    steps = options.steps or known
    if not steps:
        raise UsageError(f"there is no committed step in {options.directory}")
    results: dict[int, dict[str, Any]] = {}
    for step in steps:
        if step not in known:
            _manifest(options.directory, step)  # says what there is
        results[step] = _verified(options.directory, step, quiet=options.json)
    if options.json:
        print(json.dumps({str(step): result for step, result in results.items()}, indent=1))
    return 1 if any(result["damages"] for result in results.values()) else 0


def _verified(directory: Path, step: int, quiet: bool) -> dict[str, Any]:
    began, read = time.monotonic(), 0
    damages: list[Damage]
    try:
        manifest = catalogue.manifest_of(directory, step)
        read = size_of(manifest)
        damages = _verify_with_progress(directory, manifest, quiet)
    except (CheckpointError, OSError) as error:
        damages = [Damage(catalogue.MANIFEST, str(error))]
    seconds = time.monotonic() - began
    if not quiet:
        verdict = "damaged" if damages else "good"
        print(f"step {step}: {verdict} ({size_text(read)} in {seconds:.1f} s)", flush=True)
        for damage in damages:
            print(f"  {damage.file}: {printable(damage.what, 500)}", flush=True)
    return {
        "size_bytes": read,
        "seconds": round(seconds, 3),
        "damages": [{"file": d.file, "what": d.what, "rank": d.rank, "tensor": d.tensor} for d in damages],
    }


def _verify_with_progress(directory: Path, manifest: Manifest, quiet: bool) -> list[Damage]:
    if quiet or not sys.stderr.isatty():
        return verify_step(directory, manifest)
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"step {manifest.step}", total=size_of(manifest))
        return verify_step(directory, manifest, lambda size: progress.advance(task, size))


# -- text --------------------------------------------------------------------------------------------------------------


def size_text(size: int) -> str:
    """Bytes as people read them: ``1.06 GB``."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}" if unit != "B" else f"{size} B"
        value /= 1000
    return f"{value:.4g} TB"


def _print_columns(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
