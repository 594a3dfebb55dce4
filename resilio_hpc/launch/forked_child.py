"""What a forked process does between the fork and the user's first line: become like a freshly started one."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from resilio_hpc.launch import process_tree
from resilio_hpc.launch.spawner_messages import RankCommand


def detach(parent: int, close: Sequence[int]) -> None:
    """A session of its own, the default signal handlers, none of the spawner's sockets; dies with the spawner."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.setsid()
    process_tree.die_with_parent(parent, signal.SIGKILL)
    for fd in close:
        os.close(fd)


def take_place(command: RankCommand, stdout: int, stderr: int) -> None:
    """Outputs, directory, affinity and environment of one rank; ``stdout`` and ``stderr`` are closed."""
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for fd in {stdout, stderr} - {1, 2}:
        os.close(fd)
    os.chdir(command.cwd)
    if command.cpus:
        os.sched_setaffinity(0, command.cpus)
    os.environ.update(command.env)


def refresh(command: RankCommand) -> None:
    """Undo what a fork shares and a new interpreter would not: seeds, keys, thread counts."""
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)
    wanted = _threads_wanted(command)
    torch = sys.modules.get("torch")
    if wanted and torch is not None and torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)
        _set_blas_threads(wanted)


def _threads_wanted(command: RankCommand) -> int:
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if text:
        return int(text) if text.isdigit() else 0
    return len(command.cpus) if command.cpus else 0


def _set_blas_threads(wanted: int) -> None:
    """numpy's OpenBLAS counted the cores when it was loaded; it offers no Python function to count again."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not numpy.__file__:
        return
    for library in sorted((Path(numpy.__file__).parent.parent / "numpy.libs").glob("lib*openblas*")):
        handle = ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        for prefix in ("scipy_", ""):
            for suffix in ("64_", ""):
                function = getattr(handle, f"{prefix}openblas_set_num_threads{suffix}", None)
                if function is not None:
                    function(wanted)
                    return
