"""A file or folder that appears whole, under its name, or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from resilio_hpc.core.durable import sync_directory
from resilio_hpc.core.errors import UsageError

DCP_METADATA = ".metadata"


def check_target(target: Path, is_folder: bool, overwrite: bool) -> None:
    """Raise UsageError where nothing can be written, or an existing target must not be replaced."""
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent} is not a directory; make it first")
    if not os.path.lexists(target):
        return
    if target.is_dir() and not is_folder:
        raise UsageError(f"{target} is a directory")
    if not overwrite:
        raise UsageError(f"{target} exists; remove it, or say --overwrite")
    if is_folder and not (target / DCP_METADATA).is_file():
        raise UsageError(f"{target} is not a DCP folder, and so not replaced by one")


@contextmanager
def written_whole(target: Path, is_folder: bool, overwrite: bool) -> Iterator[Path]:
    """Give a path beside ``target`` to write to; at the end of the block it becomes ``target``, durable.

    If the block raises, nothing remains, and an existing target is unchanged. Raises UsageError, OSError.
    """
    check_target(target, is_folder, overwrite)
    hidden = Path(tempfile.mkdtemp(prefix=".resilio-export-", dir=target.parent))
    try:
        made = hidden / target.name
        yield made
        sync_directory(hidden)
        if is_folder:
            sync_directory(made)
        check_target(target, is_folder, overwrite)  # again, since writing takes long
        old = hidden / "old"
        if is_folder and target.exists():
            target.rename(old)  # a folder can replace an empty folder only
        try:
            made.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
        sync_directory(target.parent)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
