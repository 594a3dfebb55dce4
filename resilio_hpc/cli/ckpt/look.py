"""``resilio ckpt ls | show | verify``: which checkpoints exist, their contents, and whether they are undamaged."""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from resilio_hpc.ckpt.format.manifest import Manifest, TensorRecord
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.fence import NAME as FENCE
from resilio_hpc.ckpt.store.fence import why_fence_is_wrong
from resilio_hpc.ckpt.store.mounts import store_of
from resilio_hpc.ckpt.store.shard_reader import ShardReader
from resilio_hpc.ckpt.store.verify import Damage, verify_step
from resilio_hpc.ckpt.store.view import write_view
from resilio_hpc.cli.common.steps import manifest_of, newest, print_columns, progress_of, size_text
from resilio_hpc.core.errors import CheckpointError, UsageError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.core.terminal import local_time

# -- ls ----------------------------------------------------------------------------------------------------------------


def ls(options: argparse.Namespace) -> int:
    """Print the committed steps."""
    found, damaged = checkpoint_index.survey(options.directory)
    together = store_of(options.directory).together
    noted = together(*(partial(checkpoint_index.noted_damage, options.directory, one.step) for one in found))
    damaged |= {one.step: why for one, why in zip(found, noted, strict=True) if why}
    rows = together(*(partial(_summary, options.directory, one) for one in found))
    if options.json:
        print(json.dumps({"steps": rows, "damaged": {str(step): why for step, why in damaged.items()}}, indent=1))
        return 1 if damaged else 0
    if not rows and not damaged:
        print(f"no checkpoint in {options.directory} yet", file=sys.stderr)
    lines: list[tuple[str, ...]] = [("step", "committed", "size", "ranks", "nodes", "layout", "epoch", "round")]
    for row in rows:
        when = local_time(row["committed"])
        size = size_text(row["size_bytes"])
        rest = [row[name] for name in ("ranks", "nodes", "layout", "epoch", "round")]
        lines.append(tuple(map(str, (row["step"], when, size, *rest))))
    print_columns(lines if rows else [])
    for step, why in damaged.items():
        print(f"step {step} is damaged: {printable(why, 300)}")
    return 1 if damaged else 0


def _summary(directory: Path, manifest: Manifest) -> dict[str, Any]:
    return {
        "step": manifest.step,
        "committed": checkpoint_index.committed_at(directory, manifest.step),
        "size_bytes": manifest.size_bytes,
        "ranks": manifest.world_size,
        "nodes": len(manifest.shards),
        "layout": manifest.layout,
        "epoch": manifest.epoch,
        "round": manifest.round,
    }


# -- show --------------------------------------------------------------------------------------------------------------


def show(options: argparse.Namespace) -> int:
    """Print the tensors, or the plain values, of a step."""
    step = newest(options.directory) if options.step is None else options.step
    manifest = manifest_of(options.directory, step)
    if options.h5:
        return _make_view(options.directory, manifest, options.json)
    try:
        shard, rank = manifest.shard_of(options.rank)
    except KeyError:
        raise UsageError(f"step {step} has ranks 0 to {manifest.world_size - 1}, not {options.rank}") from None
    try:
        with ShardReader(checkpoint_index.step_directory(options.directory, step), shard) as reader:
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
    print_columns(
        [
            (printable(t.path, 200), t.dtype, _shape(t), size_text(t.size_bytes) + ("" if t.offset >= 0 else " *"))
            for t in table.tensors
        ]
    )
    view = checkpoint_index.step_directory(options.directory, step) / checkpoint_index.VIEW
    if not store_of(view).exists(view):
        print(f"(--h5 makes {checkpoint_index.VIEW} in the step's directory: all ranks' tensors as one HDF5 file)")
    return 0


def _make_view(directory: Path, manifest: Manifest, as_json: bool) -> int:
    path = checkpoint_index.step_directory(directory, manifest.step) / checkpoint_index.VIEW
    try:
        in_parts = write_view(directory, manifest)
    except OSError as error:
        raise CheckpointError(f"step {manifest.step}: {error}") from error
    if as_json:
        print(json.dumps({"step": manifest.step, "file": str(path), "in_parts": in_parts}, indent=1))
        return 0
    print(f"step {manifest.step}: {printable(str(path), 4096)} shows it as one HDF5 file")
    for tensor in in_parts:
        print(f"  {printable(tensor, 200)}: its parts do not make one tensor; they are under their ranks")
    return 0


def _tensor(record: TensorRecord) -> dict[str, Any]:
    """Return a tensor's row for ``--json``."""
    about = {"path": record.path, "dtype": record.dtype, "shape": list(record.shape), "size_bytes": record.size_bytes}
    if record.slab is not None:
        about |= {"global_shape": list(record.slab.global_shape), "start": list(record.slab.start)}
    return about | {"here": record.offset >= 0}


def _shape(record: TensorRecord) -> str:
    if record.slab is None:
        return f"{list(record.shape)}"
    return f"{list(record.shape)} from {list(record.slab.start)} of {list(record.slab.global_shape)}"


# -- verify ------------------------------------------------------------------------------------------------------------


def verify(options: argparse.Namespace) -> int:
    """Read steps whole and print what is damaged."""
    known = sorted(
        {*checkpoint_index.committed_steps(options.directory), *checkpoint_index.damaged_steps(options.directory)}
    )
    steps = options.steps or known
    if not steps:
        raise UsageError(f"there is no committed step in {options.directory}")
    results: dict[str, dict[str, Any]] = {}
    for step in steps:
        if step not in known:
            manifest_of(options.directory, step)  # its error lists the steps that exist
        results[str(step)] = _verified(options.directory, step, quiet=options.json)
    if not options.steps and (why := checkpoint_index.why_latest_is_wrong(options.directory)):
        results["latest"] = {"damages": [{"file": "latest", "what": why}]}
        if not options.json:
            print(f"latest: {why}; a restore does not need it, the next commit writes it anew")
    if not options.steps and (why := why_fence_is_wrong(options.directory)):
        results[FENCE] = {"damages": [{"file": FENCE, "what": why}]}
        if not options.json:
            print(f"{FENCE}: {printable(why, 300)}; it is not believed, the next commit writes it anew")
    if options.json:
        print(json.dumps(results, indent=1))
    return 1 if any(result["damages"] for result in results.values()) else 0


def _verified(directory: Path, step: int, quiet: bool) -> dict[str, Any]:
    began, read = time.monotonic(), 0
    damages: list[Damage]
    try:
        manifest = checkpoint_index.manifest_of(directory, step)
        read = manifest.size_bytes
        with progress_of(f"step {step}", read, quiet) as progress:
            damages = verify_step(directory, manifest, progress)
    except (CheckpointError, OSError) as error:
        damages = [Damage(checkpoint_index.MANIFEST, str(error))]
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
