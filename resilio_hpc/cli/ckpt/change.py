"""``resilio ckpt diff | copy | prune``: steps compared, copied into other directories, and removed."""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.difference import differences
from resilio_hpc.ckpt.store.retention import Retention
from resilio_hpc.ckpt.store.step_copy import copy_step
from resilio_hpc.ckpt.store.verify import verify_step
from resilio_hpc.cli.common.steps import find_checkpoints, manifest_of, newest, progress_of, size_text
from resilio_hpc.core.errors import CheckpointError
from resilio_hpc.core.json_fields import printable


def diff(options: argparse.Namespace) -> int:
    """Compare two steps; exit code 1 where they differ."""
    other = find_checkpoints(options.other) if options.other else options.directory
    one = options.directory, manifest_of(options.directory, options.first)
    try:
        found = list(differences(one, (other, manifest_of(other, options.second))))
    except OSError as error:
        raise CheckpointError(str(error)) from error
    if options.json:
        print(json.dumps([difference._asdict() for difference in found], indent=1))
        return 1 if found else 0
    for rank, path, what in found:
        where = f"rank {rank}: " if rank >= 0 else ""
        print(f"{where}{printable(path, 200)}{': ' if path else ''}{printable(what, 300)}")
    if not found:
        print("no difference")
    return 1 if found else 0


def copy(options: argparse.Namespace) -> int:
    """Copy steps, verified."""
    target = find_checkpoints(options.target) if options.target.exists() else options.target
    steps = options.steps or [newest(options.directory)]
    manifests = [manifest_of(options.directory, step) for step in steps]
    done = []
    for manifest in manifests:
        size, began = manifest.size_bytes, time.monotonic()
        if not options.dry_run:
            with progress_of(f"step {manifest.step}", 2 * size, options.json) as progress:
                try:
                    copy_step(options.directory, manifest, target, progress)
                except OSError as error:
                    raise CheckpointError(f"step {manifest.step}: {error}") from error
        seconds = time.monotonic() - began
        done.append({"step": manifest.step, "size_bytes": size, "seconds": round(seconds, 3)})
        if not options.json:
            said = "would be copied" if options.dry_run else f"copied and verified in {seconds:.1f} s"
            print(f"step {manifest.step} ({size_text(size)}): {said}", flush=True)
    if options.json:
        print(json.dumps({"steps": done, "dry_run": options.dry_run}, indent=1))
    return 0


def prune(options: argparse.Namespace) -> int:
    """Remove steps that are not to be kept."""
    retention = Retention(options.keep_checkpoints, options.keep_every, options.keep_hours, options.keep_gb)
    now = time.time()
    try:
        _find_a_good_one(options.directory, options.json)
        steps = (checkpoint_index.expendable if options.dry_run else checkpoint_index.prune)(
            options.directory, retention, now
        )
    except OSError as error:
        raise CheckpointError(str(error)) from error
    left = [step for step in checkpoint_index.committed_steps(options.directory) if step not in steps]
    if options.json:
        print(json.dumps({"removed": steps, "kept": left, "dry_run": options.dry_run}, indent=1))
        return 0
    verb = "would be removed" if options.dry_run else "removed"
    print(f"{verb}: {', '.join(map(str, steps)) or 'none'}; kept: {', '.join(map(str, left)) or 'none'}")
    return 0


def _find_a_good_one(directory: Path, quiet: bool) -> None:
    """Where the step committed last was found damaged: the last one that is good must stay, so see which it is."""
    steps = checkpoint_index.committed(directory)
    if not steps or not checkpoint_index.noted_damage(directory, steps[-1].step):
        return
    for manifest in reversed(steps):
        if not checkpoint_index.noted_damage(directory, manifest.step):
            with progress_of(f"verifying step {manifest.step}", manifest.size_bytes, quiet) as progress:
                if not verify_step(directory, manifest, progress):
                    return


def count(text: str) -> int:
    """A number from 1 on, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def amount(text: str) -> float:
    """A number above 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
