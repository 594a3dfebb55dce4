"""Where steps lie on a node's own disk, by name, and whether what lies there is this user's.

    DIR/                                        the user's choice; never made here
      resilio-steps-<uid>-<hash>-<holder>/      0700; <hash>: of the checkpoint directory's path
        held                                    locked while a step is written; the checkpoint directory's path
        step-…-e<epoch>-r<round>/node-N.h5      the very bytes that a manifest names, or will

The owner of DIR is trusted, others who may write there are not.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

HELD = "held"
STEP = re.compile(r"step-(\d{10,18})-e(\d{1,18})-r(\d{1,18})")


def prefix(checkpoints: Path | None = None) -> str:
    """Return how the names of this user's directories begin, or of those for one directory of checkpoints."""
    mine = f"resilio-steps-{os.geteuid()}-"
    return mine if checkpoints is None else f"{mine}{hashlib.sha256(os.fsencode(checkpoints)).hexdigest()[:16]}-"


def holder_directory(directory: Path, checkpoints: Path, holder: str) -> Path:
    """Return where a holder writes: a node, or a process where each writes its own file."""
    return directory / f"{prefix(checkpoints)}{re.sub(r'[^A-Za-z0-9_.-]', '_', holder)}"


def step_name(step: int, epoch: int, round_: int) -> str:
    """Return the name of a step's directory."""
    return f"step-{step:010d}-e{epoch}-r{round_}"


def holders(directory: Path, begin: str) -> Iterator[Path]:
    """Return this user's directories whose names begin so. Raises OSError."""
    return (path for path in directory.iterdir() if path.name.startswith(begin) and is_private(path))


def check_directory(directory: Path) -> None:
    """Refuse a DIR where any user may exchange names (no sticky bit): a check there proves nothing. Raises OSError."""
    mode = directory.stat().st_mode
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise PermissionError(errno.EPERM, "any user may exchange what is in it", str(directory))


def is_private(path: Path) -> bool:
    """Return whether it is a directory, no link, of this user alone. Raises nothing."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
