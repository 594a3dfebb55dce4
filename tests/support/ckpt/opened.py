"""A file that a test has open, as the readers of a checkpoint want it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from resilio_hpc.ckpt.store.posix import PosixFile


@dataclass(frozen=True, eq=False)
class Opened:
    """A ``HasFile``."""

    file: PosixFile


def opened(descriptor: int) -> Opened:
    """The file of a descriptor, which the test closes by itself."""
    return Opened(PosixFile(os.dup(descriptor)))
