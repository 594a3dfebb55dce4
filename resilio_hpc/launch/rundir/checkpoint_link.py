"""Where a run keeps its checkpoints: ``checkpoints`` in its directory, or a link to another place.

With ``--checkpoint-dir`` it is a link of that name, to a directory or to the URL of a store. Every process of the run
reads it (``ckpt.store.mounts``), so all jobs of a chain, and all commands, find the steps by the run's directory.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from resilio_hpc.ckpt.store.mounts import RUN_CHECKPOINTS, linked_url, store_of
from resilio_hpc.core import trusted_files
from resilio_hpc.core.errors import UsageError, os_error_text


def link(run_path: Path, wanted: str) -> None:
    """Let a run, which may be new, keep its checkpoints at a URL or an absolute path.

    Raises UsageError where it has some elsewhere.
    """
    name = run_path / RUN_CHECKPOINTS
    try:
        trusted_files.make_directory(run_path)
        if not name.is_symlink():
            if name.is_dir():
                name.rmdir()
            try:
                name.symlink_to(wanted)
            except FileExistsError:  # another launch of this run was faster
                pass
        found = os.readlink(name)  # noqa: PTH115 - a path would lose a slash of the URL
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            raise UsageError(
                f"--checkpoint-dir {wanted}: {run_path} has checkpoints already: copy them (resilio ckpt copy), or "
                "choose another --run-dir"
            ) from None
        raise UsageError(f"--checkpoint-dir {wanted}: {os_error_text(error, str(run_path))}") from None
    if found != wanted:
        raise UsageError(f"--checkpoint-dir {wanted}: {run_path} keeps its checkpoints in {found}")
    check(name)


def check(name: Path) -> None:
    """Ask the store whether it can be used, before any process trains. Raises UsageError."""
    try:
        if linked_url(name):
            store_of(name).names(name)
        else:
            Path(os.path.realpath(name)).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--checkpoint-dir: {os_error_text(error, str(name))}") from None
