"""Bounded calls to a node's own disk, which may hang, and whether a save still makes progress."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from resilio_hpc.ckpt.format.pages import PAGE
from resilio_hpc.core import bounded
from resilio_hpc.core.regular_file import open_direct

PATIENCE_S = 30.0
"""Of a save: a disk that moved nothing for so long hangs. Linux gives up on an NVMe command after 30 s by itself."""
ANSWER_S = 10.0
"""For something small."""
LOCK_S = 3.0
"""For another process that writes there: a killed predecessor may take a moment to die."""
_LEAST_CPU_S = 1.0  # more than a process needs that only waits
_COUNTERS = frozenset({"wchar", "read_bytes", "write_bytes"})  # rchar grows by reading them

Result = TypeVar("Result")


@dataclass(frozen=True)
class Patience:
    """How long a disk is waited for, in seconds.

    ``silent_s``: a save without progress; ``answer_s``: a small call; ``lock_s``: another process that writes there;
    ``wait``: returns when the futures are done, or after so many seconds.
    """

    silent_s: float = PATIENCE_S
    answer_s: float = ANSWER_S
    lock_s: float = LOCK_S
    wait: bounded.Waiter = wait


PATIENCE = Patience()


def in_time(act: Callable[[], Result], patience: Patience = PATIENCE) -> Result:
    """Return or raise what ``act`` does; TimeoutError (an OSError) after ``answer_s``."""
    return bounded.in_time(act, patience.answer_s, patience.wait)


def read_page(path: Path) -> None:
    """Read the first page of a file, no link, from the device if the page cache can be bypassed. Raises OSError."""
    fd = open_direct(path, follow=False)
    try:
        os.preadv(fd, [mmap.mmap(-1, PAGE)], 0)
    finally:
        os.close(fd)


class Activity(NamedTuple):
    """The work of this process so far: its counters in /proc/self/io, None without them, and its CPU time."""

    counters: tuple[str, ...] | None
    cpu_s: float

    @classmethod
    def now(cls) -> Activity:
        """Return the work of all its threads, and of io_uring for it."""
        try:
            lines = Path("/proc/self/io").read_text().splitlines()
        except OSError:
            return cls(None, time.process_time())
        return cls(tuple(line for line in lines if line.partition(":")[0] in _COUNTERS), time.process_time())

    def has_stopped(self, since: Activity) -> bool:
        """Return whether nothing has been read, written or computed ``since`` then. Allocating memory is computing."""
        is_known = self.counters is not None and since.counters is not None
        return is_known and self.counters == since.counters and self.cpu_s - since.cpu_s < _LEAST_CPU_S
