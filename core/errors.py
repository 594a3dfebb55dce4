"""Every error that resilio_hpc raises on purpose.

ResilioError                 anything we raise; its text is one line for a user
├── UsageError               the user asked for something impossible or misspelt (exit code 2)
│   └── Untrusted            a file or directory that another user may have written
├── CommandError             an external command failed, timed out or is missing
├── SlurmError               Slurm refused or could not be asked
├── WireError                a peer sent something that is not a valid message
├── LaunchError              ranks could not be launched
├── SuspectResult              a step's result must not be used
├── HealthError              a node's state could not be read, or its verdict not kept
├── DeviceLost               a device's state is gone, and is not, or cannot be, rebuilt
└── CheckpointError          a checkpoint could not be written or read
    ├── CorruptCheckpoint    bytes do not match their checksum or description
    └── LayoutMismatch       a checkpoint does not fit the state or the world it is loaded into
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence


class ResilioError(Exception):
    """Base of all errors of this package. ``str(error)`` says what was wrong, with which value, and what to do."""


class UsageError(ResilioError):
    """A mistake in arguments, files or configuration that the user can put right."""


class Untrusted(UsageError):
    """A file or directory that others than this user or root may have written: it is neither executed nor trusted."""


class CommandError(ResilioError):
    """An external command failed: carries ``argv``, ``returncode`` (None on timeout), ``stdout``, ``stderr``."""

    def __init__(
        self, argv: Sequence[str], returncode: int | None, stdout: str = "", stderr: str = "", why: str = ""
    ) -> None:
        self.argv = list(argv)
        self.returncode = returncode
        self.stdout = stdout
        self.stderr = stderr
        last = (stderr.strip() or stdout.strip()).splitlines()[-1:] or [""]
        reason = why or f"exit code {returncode}"
        super().__init__(f"{' '.join(argv)}: {reason}{': ' if last[0] else ''}{last[0]}")


class SlurmError(ResilioError):
    """Slurm refused a request or could not be asked."""


class WireError(ResilioError):
    """A peer sent bytes that are not a valid message of this protocol version."""


class LaunchError(ResilioError):
    """Ranks could not be launched."""


class SuspectResult(ResilioError):
    """A step's result must not be used: a device computes wrong results, or the program asked to stop at it."""


class HealthError(ResilioError):
    """A node's state could not be read, or the verdict on it could not be kept."""


class DeviceLost(ResilioError, RuntimeError):
    """A device ended, or does what it should not: its state is gone. A RuntimeError, as torch's of devices."""


class CheckpointError(ResilioError):
    """A checkpoint could not be written or read."""


class SaveRefused(CheckpointError):
    """No snapshot was taken, because earlier ones are still being written. The same save may be made again."""


class CorruptCheckpoint(CheckpointError):
    """Bytes do not match their checksum or their description."""


class LayoutMismatch(CheckpointError):
    """A checkpoint does not fit the state or the world size that it is loaded into."""


_OF_FILES = frozenset(
    (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA)
)


def is_damage(error: OSError) -> bool:
    """Return whether an error is about the file. Others are about this process or machine: no room, no permission."""
    return error.errno in _OF_FILES


def os_error_text(error: OSError, where: str) -> str:
    """Return what went wrong and where, for a user.

    ``where``: the path, which also stands for the temporary files in it.
    """
    name = os.fsdecode(error.filename or "")
    return f"{error.strerror or error}: {where if not name or name.startswith(f'{where}/') else name}"
