"""``resilio ckpt export | import``: steps to and from torch.save files, safetensors, and DCP folders."""

from __future__ import annotations

import argparse
import json
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
from resilio_hpc.cli.common.steps import find_checkpoints, manifest_of, newest, progress_of, size_text
from resilio_hpc.core.errors import CheckpointError, UsageError
from resilio_hpc.core.json_fields import printable


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
    """Make a step of what another program wrote."""
    source, step = options.source, options.step
    if not 0 <= step < 1 << 53:
        raise UsageError(f"step {step} is not a whole number from 0 on")
    target = find_checkpoints(options.target) if options.target.exists() else options.target
    if checkpoint_index.step_directory(target, step).exists():
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
    """Slurm ends jobs with SIGTERM: let it remove what was begun, as Ctrl-C does."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
