"""How a training script hangs: each of these keeps a rank, or all of them, from the next step for ever."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

ALONE = ("loop", "lock", "sleep", "at-exit", "mismatch")
"""Only rank 1 does it, the others wait for it in a collective."""
TOGETHER = ("deadlock",)
"""All ranks take part."""
HANGS = (*ALONE, *TOGETHER)
STARTS = ("sleep", "stop")
"""Rank 1 does it before it says a word, the others wait for it in ``init_process_group``."""


def hang(kind: str, rank: int) -> None:
    """Hang in this way. ``mismatch`` and ``deadlock`` need torch.distributed."""
    _WAYS[kind](rank)
    raise AssertionError(f"{kind} did not hang")


def before_start(kind: str) -> None:
    """Hang before anything else is done; ``stop`` goes on when the process is continued."""
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind:
        _WAYS[kind](1)


def read(path: Path) -> None:
    """Read a file, as a data loader does in each step: it hangs with its file system."""
    path.read_bytes()


def _loop(_: int) -> None:
    while True:
        pass


def _lock(_: int) -> None:
    """Hold Python's lock in a C function that does not return: a signal does not interrupt it."""
    re.match(r"(a+)+b", "a" * 64)


def _sleep(_: int) -> None:
    time.sleep(1_000_000)


def _exit(_: int) -> None:
    """Fail, and wait at the interpreter's end for a thread, as libraries do for what they have begun."""
    threading.Thread(target=_sleep, args=(0,)).start()
    raise RuntimeError("planted, and a thread lives on")


def _mismatch(_: int) -> None:
    """Enter a barrier where the others reduce."""
    import torch.distributed as dist

    dist.barrier()


def _deadlock(rank: int) -> None:
    """Reduce in two groups, rank 1 in the other order."""
    import torch
    import torch.distributed as dist

    groups = [dist.new_group(), dist.new_group()]
    for group in groups if rank != 1 else reversed(groups):
        dist.all_reduce(torch.ones(1), group=group)


_WAYS: dict[str, Callable[[int], None]] = {
    "loop": _loop, "lock": _lock, "sleep": _sleep, "at-exit": _exit, "mismatch": _mismatch,
    "deadlock": _deadlock,
}  # fmt: skip
