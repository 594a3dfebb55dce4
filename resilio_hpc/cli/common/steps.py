"""Shared by the commands of ``resilio ckpt``: finding steps, progress on long work, text."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from resilio_hpc.ckpt.format.manifest import Manifest
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.mounts import store_of
from resilio_hpc.core import terminal, trusted_files
from resilio_hpc.core.errors import CheckpointError, UsageError


def find_checkpoints(directory: Path) -> Path:
    """Return the directory of checkpoints that a user means: the path itself, or that of a run. Raises UsageError."""
    if (directory / "run.json").is_file():
        return trusted_files.run_directory(directory) / "checkpoints"
    store = store_of(directory)
    if not store.is_directory(directory, follow=True):
        raise UsageError(f"{directory} is not a directory")
    if store.exists(directory / checkpoint_index.MANIFEST):
        raise UsageError(f"{directory} is one step: give the directory that it is in, {directory.absolute().parent}")
    return directory


def manifest_of(directory: Path, step: int) -> Manifest:
    """Return the manifest of a step. Raises UsageError, which lists the existing steps, or CheckpointError."""
    try:
        return checkpoint_index.manifest_of(directory, step)
    except FileNotFoundError:
        steps = ", ".join(map(str, checkpoint_index.committed_steps(directory))) or "none"
        raise UsageError(f"there is no step {step} in {directory}; committed: {steps}") from None
    except OSError as error:
        raise CheckpointError(f"step {step}: {error}") from error


def newest(directory: Path) -> int:
    """Return the step committed last. Raises UsageError without one."""
    steps = checkpoint_index.committed_steps(directory)
    if not steps:
        raise UsageError(f"there is no committed step in {directory}")
    return steps[-1]


LEAST_ROOM = 20  # columns for the last column of a table that is folded


@contextmanager
def progress_of(what: str, size: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Give a bar on a terminal, for ``size`` bytes; call what it gives with each number of bytes done."""
    if quiet or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=terminal.console(sys.stderr), transient=True) as progress:
        task = progress.add_task(what, total=size)
        yield lambda done: progress.advance(task, done)


def size_text(size: int) -> str:
    """Return bytes as people read them: ``1.06 GB``."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}" if unit != "B" else f"{size} B"
        value /= 1000
    return f"{value:.4g} TB"


def print_columns(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows as a table without lines. In a narrow terminal the last column goes over several lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    before = sum(widths[:-1]) + 2 * (len(widths) - 1)
    room = terminal.columns(0) - before
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        if room < LEAST_ROOM:
            print(line)
            continue
        for number, part in enumerate(textwrap.wrap(row[-1], room) or [""]):
            print((line[:before].ljust(before) if number == 0 else " " * before) + part)
