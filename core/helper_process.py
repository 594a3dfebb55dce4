"""What helper processes have in common: how they begin."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from io import FileIO
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_NICE = 10
_IOPRIO_WHO_PROCESS, _LOWEST_BEST_EFFORT = 1, 2 << 13 | 7  # linux/ioprio.h
_SYS_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}


def begin(outlives_parent: bool = False, is_urgent: bool = False) -> FileIO | None:
    """Become a helper at low priority that dies with its parent; where answers go. None: the parent is dead already.

    ``outlives_parent``: it does not die with it, and ends by itself. ``is_urgent``: it does what others wait for, too,
    and has threads that ``step_back`` for the rest.
    Standard output is standard error from here on: a stray print of some library must not become an answer.
    """
    if not outlives_parent:
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            return None  # it died before the request to die with it
    # Ctrl-C and Slurm's signals may reach the whole group or step; the parent decides when we end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if not is_urgent:
        step_back()
        _step_back_as_session()
    answers = FileIO(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def step_back() -> None:
    """Make this thread last in line for processors and disks. SCHED_BATCH: waking up ends no other's turn."""
    os.nice(_NICE)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    call = _SYS_IOPRIO_SET.get(os.uname().machine)
    if call is not None:  # which only some schedulers of disks heed
        ctypes.CDLL(None).syscall(call, _IOPRIO_WHO_PROCESS, 0, _LOWEST_BEST_EFFORT)


def _step_back_as_session() -> None:
    """Where the kernel shares processors out among sessions, niceness counts only within one (sched(7)).

    Ours is our own.
    """
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # there is no such file, or it may not be written
            Path("/proc/self/autogroup").write_text(str(_NICE))
