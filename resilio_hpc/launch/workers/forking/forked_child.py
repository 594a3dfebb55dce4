"""What a forked process does before the user's first line, to become like a freshly started one."""

from __future__ import annotations

import atexit
import ctypes
import errno
import gc
import os
import random
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from resilio_hpc.core import process_title, stack_dump
from resilio_hpc.launch.process import process_tree
from resilio_hpc.launch.workers.forking import open_files, rank_main
from resilio_hpc.launch.workers.forking.spawner_messages import RankCommand

_REPORTS_LEAKS = "triton"
"""A package that prints what the last collection leaves; that one finds nothing which the zygote froze."""


def fork() -> int:
    """Fork with all signals blocked: the child keeps them pending until it has its own handlers (see ``detach``)."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid != 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return pid


def detach(parent: int, close: Sequence[int]) -> None:
    """Begin a session with default signal handlers, without the spawner's sockets; die with the spawner."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, *process_tree.WARNINGS):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.setsid()
    process_tree.die_with_parent(parent, signal.SIGKILL)
    for fd in close:
        os.close(fd)


def take_place(command: RankCommand, stdout: int, stderr: int) -> None:
    """Set streams, directory, affinity, limits and environment of one rank; ``stdout`` and ``stderr`` get closed."""
    if command.stdin_path:
        stdin = os.open(command.stdin_path, os.O_RDONLY)
        os.dup2(stdin, 0)
        os.close(stdin)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for fd in {stdout, stderr} - {1, 2}:
        os.close(fd)
    if not stands_in(command.cwd):
        os.chdir(command.cwd)
    if command.cpus:
        os.sched_setaffinity(0, command.cpus)
    if command.open_files is not None:
        open_files.give_back(command.open_files)
    os.environ.update(command.env)


def refresh(command: RankCommand) -> None:
    """Renew what a forked process shares and a new interpreter would not: seeds, keys, thread counts."""
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)
    wanted = _threads_wanted(command)
    torch = sys.modules.get("torch")
    if torch is not None:
        # torch seeds the CPU's generator at random on import; the other devices' seeds are constants
        torch.default_generator.seed()
    if wanted and torch is not None and torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)
        _set_blas_threads(wanted)


def _threads_wanted(command: RankCommand) -> int:
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if text:
        return int(text) if text.isdigit() else 0
    return len(command.cpus) if command.cpus else 0


def _set_blas_threads(wanted: int) -> None:
    """Set the number of threads of numpy's OpenBLAS.

    It counted the cores when it was loaded, and has no Python function to change that.
    """
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


def program(command: RankCommand, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return what to execute for a rank that is not forked. Raises FileNotFoundError."""
    if command.kind != "command":
        return (sys.executable, "-u", rank_main.__file__, command.kind, *command.argv)
    name = command.argv[0]
    path = command.env.get("PATH", environment.get("PATH"))
    found = shutil.which(str(Path(command.cwd, name)) if "/" in name else name, path=path)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, "no such program, or not executable", name)
    return (found, *command.argv[1:])


def stands_in(path: str) -> bool:
    """Return whether ``path`` is the working directory already, without a call to its file system."""
    try:
        return os.getcwd() == path  # noqa: PTH109 - Path.cwd() is the same
    except OSError:  # the directory was removed
        return False


def enter(cwd: str) -> None:
    """Enter the directory of the ranks, once: ranks forked there do not depend on a file system that hangs later."""
    if cwd and not stands_in(cwd):
        try:
            os.chdir(cwd)
        except OSError:
            pass  # each rank will report it


def check_directory(path: str) -> None:
    """Raise NotADirectoryError where a rank could not use ``path`` as its working directory."""
    if stands_in(path):
        return
    if not (Path(path).is_dir() and os.access(path, os.X_OK)):
        raise NotADirectoryError(errno.ENOTDIR, "not a directory that can be entered", path)


def open_outputs(command: RankCommand) -> tuple[int, int]:
    """Open a rank's output files, to which every round appends; return the same descriptor twice for equal paths."""
    stdout = _open_output(command.stdout_path)
    if command.stderr_path == command.stdout_path:
        return stdout, stdout
    try:
        return stdout, _open_output(command.stderr_path)
    except OSError:
        os.close(stdout)
        raise


def _open_output(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def become_rank(command: RankCommand, stdout: int, stderr: int, executed: tuple[str, ...]) -> None:
    """Run the rank: execute ``executed``, or run it in this process if that is empty."""
    try:
        take_place(command, stdout, stderr)
    except OSError as error:
        sys.exit(f"cannot start local rank {command.local_rank}: {error}")
    if executed:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and its children inherit that
            signal.signal(number, signal.SIG_DFL)
        try:
            os.execv(executed[0], executed)
        except OSError as error:
            print(f"cannot execute {executed[0]}: {error.strerror}", file=sys.stderr)
            os._exit(126)
    process_title.show_rank(command.kind, command.argv, os.environ.get(process_tree.TOKEN_VARIABLE, ""))
    refresh(command)
    stack_dump.write_when_asked()
    if _REPORTS_LEAKS in sys.modules:
        atexit.register(gc.unfreeze)  # it costs half a second at the end, as in any other process
    rank_main.run(command.kind, command.argv)
