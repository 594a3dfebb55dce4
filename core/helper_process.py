"""The common start of all helper processes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
from io import FileIO
from pathlib import Path

from resilio_hpc.core import process_title

_PR_SET_PDEATHSIG = 1
_NICE = 10
_IOPRIO_WHO_PROCESS, _LOWEST_BEST_EFFORT = 1, 2 << 13 | 7  # linux/ioprio.h
_SYS_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}


def begin(role: str, outlives_parent: bool = False, is_urgent: bool = False) -> FileIO | None:
    """Become a helper at low priority that dies with its parent; return where answers go.

    ``role``: what ps shows.
    None: the parent is dead already. ``outlives_parent``: it does not die with it, and ends by itself. ``is_urgent``:
    other processes wait for some of its work; its threads for the rest call ``step_back``. Standard output is standard
    error from here on: a stray print of some library must not become an answer.
    """
    process_title.show(role)
    gc.freeze()  # what was imported stays: looking through it for garbage at the end takes a tenth of a short life
    if not outlives_parent:
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            return None  # the parent died before the request to die with it
    # Ctrl-C and Slurm's signals may reach the whole group or step; the parent decides when the helper ends
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if not is_urgent:
        step_back()
        _step_back_as_session()
    answers = FileIO(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def step_back() -> None:
    """Give this thread the lowest priority for processors and disks.

    SCHED_BATCH: its wake-ups do not preempt others.
    """
    os.nice(_NICE)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    call = _SYS_IOPRIO_SET.get(os.uname().machine)
    if call is not None:  # only some schedulers of disks use it
        ctypes.CDLL(None).syscall(call, _IOPRIO_WHO_PROCESS, 0, _LOWEST_BEST_EFFORT)


def _step_back_as_session() -> None:
    """Lower the priority of this helper's own session.

    Where the kernel shares processors among sessions, niceness counts only within one (sched(7)).
    """
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # the file may be missing, or not writable
            Path("/proc/self/autogroup").write_text(str(_NICE))
