"""The lowest epoch that may still commit to a directory of checkpoints: ``epoch-fence``, a number and its checksum.

A controller that was replaced must commit nothing. So a damaged file is not taken for "any epoch": the epochs that the
run's directory and the committed steps name hold in its place, and the next commit writes it again. Files of earlier
versions have no checksum. Beside the ``epoch.N`` of a run, a number that no controller claimed is damage, too.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

from resilio_hpc.ckpt.store.mounts import store_of
from resilio_hpc.core import regular_file
from resilio_hpc.core.errors import CheckpointError
from resilio_hpc.native import crc32c

NAME = "epoch-fence"
_LINE = re.compile(rb"([0-9]{1,18})(?: crc32c ([0-9a-f]{8}))?\n?")
_CLAIM = re.compile(r"epoch\.([0-9]{1,18})")
CommittedEpochs = Callable[[], list[int]]
"""Gives the epochs of the committed steps."""


def why_fence_is_wrong(directory: Path) -> str:
    """Return why no controller wrote this file; "" where one did, or it is missing. Raises OSError."""
    return _read(directory, list)[1]


def raise_fence(directory: Path, epoch: int) -> None:
    """From now on refuse every commit of an epoch below ``epoch``. Raises OSError."""
    kept, why_wrong = _read(directory, list)
    if epoch > kept or why_wrong:
        _write(directory, max(epoch, kept))


def check_fence(directory: Path, epoch: int, epochs: CommittedEpochs) -> None:
    """Raise CheckpointError where ``epoch`` may not commit, OSError. A damaged file is rewritten."""
    lowest, why_wrong = _read(directory, epochs)
    if epoch < lowest:
        raise CheckpointError(f"epoch {epoch} may not commit any more: epoch {lowest} has taken over")
    if why_wrong:
        with contextlib.suppress(OSError):
            _write(directory, lowest)


def _read(directory: Path, epochs: CommittedEpochs) -> tuple[int, str]:
    """Return the lowest epoch, and what is wrong with the file."""
    try:
        data = store_of(directory).read(directory / NAME, 100)
    except FileNotFoundError:
        return 0, ""
    except regular_file.NotRegular as error:
        data = str(error.strerror).encode()
    found = _LINE.fullmatch(data)
    if found is not None and found[2] is not None and int(found[2], 16) == crc32c(found[1]):
        return int(found[1]), ""
    claimed = _claimed(directory.parent)
    if found is None:
        why = f"it says {data[:40].decode('ascii', 'backslashreplace')!r}, not an epoch"
    elif found[2] is not None:
        why = f"epoch {int(found[1])} does not match its checksum"
    elif claimed and int(found[1]) > max(claimed):
        why = f"it says epoch {int(found[1])}, and no controller was later than {max(claimed)}"
    else:
        return int(found[1]), ""
    return max([0, *claimed, *epochs()]), why


def _claimed(run_directory: Path) -> list[int]:
    """Return the epochs whose controllers have a file in the directory of the run, if it is one."""
    try:
        names = store_of(run_directory).names(run_directory)
    except OSError:
        return []
    return [int(found[1]) for name in names if (found := _CLAIM.fullmatch(name))]


def _write(directory: Path, epoch: int) -> None:
    text = str(epoch).encode()
    store_of(directory).write(directory / NAME, b"%s crc32c %08x\n" % (text, crc32c(text)))
