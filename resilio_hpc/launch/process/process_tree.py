"""Process trees: which processes descend from which, and the end of all of them, daemons included.

A process belongs to a run's tree by parentage (the spawner is a subreaper, so a process that detaches itself becomes
its child again) or by the token that it inherited in its environment (processes that are left after the spawner itself
was killed).
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

TOKEN_VARIABLE = "RESILIO_TREE_TOKEN"

PROC = Path("/proc")
TRACKERS_S = 1.0  # seconds that trackers have to end, after the processes for which they clean up
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)  # loaded here, so that a forked child needs no dlopen


def _prctl(option: int, value: int | bytes) -> None:
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Let the kernel send ``number`` to this process when the thread of ``parent`` that started it ends.

    Exit if it has ended already.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(128 + number)


def become_subreaper() -> None:
    """Become a subreaper: orphans among this process's descendants become its children instead of init's (prctl(2))."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def outlive_warnings() -> None:
    """Ignore SIGUSR1 and SIGUSR2: Slurm may send ``sbatch --signal`` to a whole step, and only agents understand it.

    Ranks get the default back (``forked_child.detach``), as a plain process has it.
    """
    for number in WARNINGS:
        signal.signal(number, signal.SIG_IGN)


def children(pid: int, proc: Path = PROC) -> list[int]:
    """Return the direct children of all threads of ``pid``; none where it is gone."""
    found: list[int] = []
    try:
        tasks = [entry.name for entry in Path(f"{proc}/{pid}/task").iterdir()]
    except OSError:
        return found
    for task in tasks:
        try:
            with open(f"{proc}/{pid}/task/{task}/children", "rb") as file:
                found.extend(int(word) for word in file.read().split())
        except FileNotFoundError:
            if Path(f"{proc}/{pid}/task/{task}").is_dir():  # the kernel may lack this file
                return [child for child in _pids(proc) if _parent(child, proc) == pid]
        except OSError:
            continue
    return found


def _pids(proc: Path) -> list[int]:
    return [int(entry.name) for entry in proc.iterdir() if entry.name.isdigit()]


def stat(pid: int, proc: Path = PROC) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the state on (field 3 of proc(5)).

    Empty where there is no such process.
    """
    try:
        text = Path(f"{proc}/{pid}/stat").read_bytes()
    except OSError:
        return []
    return text.rpartition(b")")[2].split()  # the name before it may hold spaces and brackets


def _parent(pid: int, proc: Path) -> int | None:
    fields = stat(pid, proc)
    return int(fields[1]) if fields else None


def descendants(pid: int, proc: Path = PROC) -> list[int]:
    """Return children, their children and so on, parents before children, without ``pid`` itself."""
    found: dict[int, None] = {}
    pending = children(pid, proc)
    while pending:
        child = pending.pop()
        if child not in found and child != pid:
            found[child] = None
            pending.extend(children(child, proc))
    return list(found)


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to each process that still exists and may be signalled."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            pass


def stop_and_kill(pid: int) -> None:
    """End a process that may be half made, and what is below it: all are stopped first, so that none does anything."""
    tree = [pid, *descendants(pid)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        send(tree, number)


def signal_group(leader: int, number: int) -> None:
    """Signal the process group that ``leader`` leads, or is about to lead."""
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        send([leader], number)  # it was forked just now, and is not yet a leader


def is_tracker(pid: int, proc: Path = PROC) -> bool:
    """Return whether the process cleans up after other processes, and ends by itself when they have ended.

    These are the resource trackers of multiprocessing and loky, and torch's shared memory manager.
    """
    try:
        with open(f"{proc}/{pid}/cmdline", "rb") as file:
            words = file.read()
    except OSError:
        return False
    return b"resource_tracker" in words or b"torch_shm_manager" in words


def without_trackers(pids: Iterable[int]) -> list[int]:
    """Return those of ``pids`` that are no trackers, and so do not end by themselves."""
    return [pid for pid in pids if not is_tracker(pid)]


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by a signal or a debugger: it answers nothing."""
    fields = stat(pid)
    return bool(fields) and fields[0] in (b"T", b"t")


def handles(pid: int, number: int, proc: Path = PROC) -> bool:
    """Return whether a process has its own handler for a signal."""
    try:
        with open(f"{proc}/{pid}/status", "rb") as file:
            caught = next((line.split()[1] for line in file if line.startswith(b"SigCgt:")), b"0")
    except OSError:
        return False
    return bool(int(caught, 16) >> (number - 1) & 1)


def runs(pid: int, proc: Path = PROC) -> bool:
    """Return whether a process exists and is no zombie."""
    return stat(pid, proc)[:1] not in ([], [b"Z"], [b"X"])


def wait_for_ends(pids: Iterable[int], limit_s: float) -> None:
    """Return when none of these processes runs any more, or after ``limit_s``."""
    left, deadline = list(pids), time.monotonic() + limit_s
    while (left := list(filter(runs, left))) and time.monotonic() < deadline:
        time.sleep(0.005)


def kill_descendants(root: int, spare: frozenset[int] = frozenset()) -> list[int]:
    """Send SIGKILL to all descendants of ``root`` except ``spare``, and return their pids.

    Each pass stops what it finds before the next one looks, so processes that fork meanwhile are caught: when a pass
    finds no new process, none is left that could fork.
    """
    frozen: dict[int, None] = {}
    for _ in range(50):
        new = [pid for pid in descendants(root) if pid not in frozen and pid not in spare]
        if not new:
            break
        send(new, signal.SIGSTOP)
        frozen.update(dict.fromkeys(new))
    send(frozen, signal.SIGKILL)
    return list(frozen)


def with_token(token: str, proc: Path = PROC, variable: str = TOKEN_VARIABLE) -> list[int]:
    """Return processes whose environment at exec held ``variable=token``, without this process and its ancestors."""
    wanted = f"{variable}={token}".encode()
    return [pid for pid in strangers(proc) if _has_token(pid, wanted, proc)]


def strangers(proc: Path = PROC) -> list[int]:
    """Return all processes but this one and its ancestors."""
    kin = _ancestors(os.getpid(), proc)
    return [pid for pid in _pids(proc) if pid not in kin]


def _has_token(pid: int, wanted: bytes, proc: Path) -> bool:
    try:
        with open(f"{proc}/{pid}/environ", "rb") as file:
            return wanted in file.read().split(b"\0")
    except OSError:
        return False  # it is gone, or belongs to another user


def _ancestors(pid: int, proc: Path) -> set[int]:
    kin: set[int] = set()
    parent: int | None = pid
    while parent and parent not in kin:
        kin.add(parent)
        parent = _parent(parent, proc)
    return kin


def sweep(
    token: str, timeout_s: float = 2.0, variable: str = TOKEN_VARIABLE, trackers_s: float = TRACKERS_S
) -> list[int]:
    """Kill what an earlier spawner left behind, found by its token; return the pids killed.

    The search is repeated until none is left or ``timeout_s`` is over. Trackers have ``trackers_s`` to end by
    themselves. A pidfd is taken before the token is read a second time, so a reused pid is never hit.
    """
    wanted = f"{variable}={token}".encode()
    killed: dict[int, None] = {}
    began = time.monotonic()
    while True:
        waited = time.monotonic() - began
        left = with_token(token, variable=variable)
        doomed = left if waited >= trackers_s else without_trackers(left)
        doomed = [pid for pid in doomed if kill_if(pid, partial(_has_token, pid, wanted, PROC))]
        killed.update(dict.fromkeys(doomed))
        reap(left)
        if not left or waited >= timeout_s:
            return list(killed)
        time.sleep(0.002 if doomed else 0.01)


def kill_if(pid: int, is_meant: Callable[[], bool]) -> bool:
    """Send SIGKILL, unless the pid is another process's by now; return whether it was sent."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not is_meant():
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def reap(pids: Iterable[int]) -> None:
    """Reap those of ``pids`` that are ended children of this process (orphans that a subreaper adopted)."""
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            pass
