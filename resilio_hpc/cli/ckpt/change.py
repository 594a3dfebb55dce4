"""``resilio ckpt diff | copy | prune``: compare steps, copy them into other directories, and remove them."""

from __future__ import annotations

import argparse
import json
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from resilio_hpc.ckpt.convert.export import export_step, format_of, size_in
from resilio_hpc.ckpt.convert.import_step import import_step, open_source
from resilio_hpc.ckpt.convert.target import check_target
from resilio_hpc.ckpt.convert.whole_state import WholeState
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.difference import differences
from resilio_hpc.ckpt.store.mounts import store_of
from resilio_hpc.ckpt.store.retention import Retention
from resilio_hpc.ckpt.store.step_copy import copy_step
from resilio_hpc.ckpt.store.verify import verify_step
from resilio_hpc.cli.common.steps import find_checkpoints, manifest_of, newest, progress_of, size_text
from resilio_hpc.core.errors import CheckpointError, UsageError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.slurm.runs import run_names


def diff(options: argparse.Namespace) -> int:
    """Compare two steps; return 1 where they differ."""
    other = find_checkpoints(run_names.run_path(str(options.other))) if options.other else options.directory
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
    target = find_checkpoints(options.target) if store_of(options.target).exists(options.target) else options.target
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
    """Remove steps that the rules do not keep."""
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
    """Verify older steps where the newest one was found damaged, since the last good one must stay."""
    steps = checkpoint_index.committed(directory)
    if not steps or not checkpoint_index.noted_damage(directory, steps[-1].step):
        return
    for manifest in reversed(steps):
        if not checkpoint_index.noted_damage(directory, manifest.step):
            with progress_of(f"verifying step {manifest.step}", manifest.size_bytes, quiet) as progress:
                if not verify_step(directory, manifest, progress):
                    return


def count(text: str) -> int:
    """Return a number from 1 on, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def amount(text: str) -> float:
    """Return a number above 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def export(options: argparse.Namespace) -> int:
    """Write a step in another format."""
    step = newest(options.directory) if options.step is None else options.step
    manifest, target = manifest_of(options.directory, step), options.target
    format_ = options.format or format_of(target)
    check_target(target, format_ == "dcp", options.overwrite)
    if options.rank is not None and not 0 <= options.rank < manifest.world_size:
        raise UsageError(f"step {step} has ranks 0 to {manifest.world_size - 1}, not {options.rank}")
    began, notes = time.monotonic(), []
    try:
        with WholeState(options.directory, manifest, options.rank) as whole, _cleaned_up_when_ended():
            size, tensors = size_in(whole, format_), len(whole.tensors)
            if not options.dry_run:
                with progress_of(f"step {step}", size, options.json) as progress:
                    notes = export_step(whole, target, format_, options.overwrite, progress)
    except OSError as error:
        raise CheckpointError(f"step {step}: {error}") from error
    if manifest.world_size > 1 and options.rank is None:
        notes.append(f"plain values are those of rank 0 of {manifest.world_size}")
    seconds = time.monotonic() - began
    about = {"step": step, "target": str(target), "format": format_, "tensors": tensors, "size_bytes": size}
    said = "would be exported to" if options.dry_run else "exported to"
    _say(options, about, f"step {step} ({tensors} tensors, {size_text(size)}): {said} {_name(target)}", seconds, notes)
    return 0


def import_(options: argparse.Namespace) -> int:
    """Make a step of another program's file."""
    source, step = options.source, options.step
    if not 0 <= step < 1 << 53:
        raise UsageError(f"step {step} is not a whole number from 0 on")
    target = find_checkpoints(options.target) if store_of(options.target).exists(options.target) else options.target
    if store_of(target).exists(checkpoint_index.step_directory(target, step)):
        raise UsageError(f"step {step} is in {target} already")
    format_, began = options.format or format_of(source), time.monotonic()
    try:
        opened = open_source(source, format_)
        tensors, size = len(opened.flattened.leaves), opened.size_bytes
        if not options.dry_run:
            with _cleaned_up_when_ended(), progress_of(f"step {step}", 2 * size, options.json) as progress:
                import_step(opened, target, step, options.layout, progress)
    except OSError as error:
        raise CheckpointError(f"{source}: {error}") from error
    about = {"source": str(source), "format": format_, "directory": str(target), "step": step, "layout": options.layout}
    said = "would become" if options.dry_run else "imported and verified as"
    layout = ", layout=REPLICATED" if options.layout == "replicated" else ""
    _say(
        options,
        {**about, "tensors": tensors, "size_bytes": size},
        f"{_name(source)} ({tensors} tensors, {size_text(size)}): {said} step {step} of {_name(target)}",
        time.monotonic() - began,
        [f"any number of processes can restore it, with Checkpointer(…{layout})"],
    )
    return 0


def _say(options: argparse.Namespace, about: dict[str, object], text: str, seconds: float, notes: list[str]) -> None:
    if options.json:
        print(json.dumps({**about, "seconds": round(seconds, 3), "notes": notes, "dry_run": options.dry_run}, indent=1))
        return
    print(text if options.dry_run else f"{text} in {seconds:.1f} s")
    for note in notes:
        print(f"  {printable(note, 300)}")


def _name(path: Path) -> str:
    return printable(str(path), 300)


@contextmanager
def _cleaned_up_when_ended() -> Iterator[None]:
    """Turn SIGTERM, with which Slurm ends jobs, into a clean-up of what was begun, as for Ctrl-C."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
