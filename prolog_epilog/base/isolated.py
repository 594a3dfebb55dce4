"""Work in a child that may be killed: its reads may hang, and then only the child does.

The child notes in shared memory which path or call it is about to touch, so that a time-out can be traced to it. A
child in uninterruptible sleep (state D) survives SIGKILL: it is left behind, and named.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.core.json_fields import printable

Mark = Callable[[str], None]
"""Says what is touched next: a path, or the name of a call."""

_MARK_BYTES = 1024
_MOST_BYTES = 1 << 20
_DEATH_S, _SLOW_DEATH_S = 0.2, 2.0
"""After SIGKILL: for a process in state D, and for one that only waits for its turn on a busy machine."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Stuck:
    """A child that SIGKILL did not end. ``started``: in clock ticks since boot, which identifies it."""

    pid: int
    started: int
    where: str


@dataclass(frozen=True)
class Ended:
    """How a child ended: ``answer``: its output, None if it died or ran out of time (``overdue``)."""

    answer: bytes | None
    overdue: bool
    seconds: float
    touched: str
    signal: int = 0
    stuck: Stuck | None = None


class Child:
    """A running child. ``fileno`` is for poll(2); call ``collect`` when it is readable, and at the ``deadline``.

    ``kill`` sends a signal, as os.kill. A child that has not ended ``slow_death_s`` after SIGKILL is left behind.
    """

    def __init__(
        self,
        work: Callable[[Mark], bytes],
        budget_s: float,
        *,
        kill: Callable[[int, int], None] = os.kill,
        slow_death_s: float = _SLOW_DEATH_S,
    ) -> None:
        self._kill, self._slow_death_s = kill, slow_death_s
        self._shared = mmap.mmap(-1, _MARK_BYTES)
        read, write = os.pipe2(os.O_CLOEXEC)
        self._began = time.monotonic()
        self.deadline = self._began + budget_s
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _be_the_child(work, self._shared, write, parent)
        os.close(write)
        self._read = read
        os.set_blocking(read, False)
        self._answer = bytearray()

    def fileno(self) -> int:
        return self._read

    def collect(self) -> Ended | None:
        """Return how it ended; None while it runs. Kill it when its time is up, or when its output is too long."""
        whole = self._drain()
        overdue = not whole and time.monotonic() >= self.deadline
        if not whole and not overdue and len(self._answer) <= _MOST_BYTES:
            return None
        with contextlib.suppress(ProcessLookupError):
            self._kill(self.pid, signal.SIGKILL)
        status = _reaped(self.pid, self._slow_death_s)
        os.close(self._read)
        touched = self._touched()
        seconds = time.monotonic() - self._began
        stuck = _stuck(self.pid) if status is None else None
        number = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else 0
        fine = whole and self._answer[-1:] == b"\n" and len(self._answer) <= _MOST_BYTES
        return Ended(bytes(self._answer) if fine else None, overdue, seconds, touched, number, stuck)

    def _drain(self) -> bool:
        """Return whether the child's output is complete."""
        while len(self._answer) <= _MOST_BYTES:
            try:
                data = os.read(self._read, 65536)
            except BlockingIOError:
                return False
            if not data:
                return True
            self._answer += data
        return False

    def _touched(self) -> str:
        length = int.from_bytes(self._shared[:2], "little")
        return printable(self._shared[2 : 2 + min(length, _MARK_BYTES - 2)].decode(errors="replace"), 300)


def gather(children: list[Child], each: Callable[[Child, Ended], None]) -> None:
    """Wait for all children, each until its deadline; ``each`` may append more of them to the list."""
    while children:
        poll = select.poll()
        for child in children:
            poll.register(child.fileno(), select.POLLIN | select.POLLHUP)
        left = min(child.deadline for child in children) - time.monotonic()
        poll.poll(max(0.0, left) * 1000 + 1)
        for child in list(children):
            ended = child.collect()
            if ended is not None:
                children.remove(child)
                each(child, ended)


@dataclass
class OneAtATime:
    """Runs work on a path that may hang: each time in a child, and not while the last one cannot be killed."""

    budget_s: float
    _stuck: Stuck | None = None

    def answer(self, path: Path, work: Callable[[], bytes]) -> bytes | None:
        """Return the child's answer; None without one in time."""
        if self._stuck is not None and still_there(self._stuck.pid, self._stuck.started):
            return None
        found: list[Ended] = []

        def marked(mark: Mark) -> bytes:
            mark(str(path))
            return work()

        gather([Child(marked, self.budget_s)], lambda _, ended: found.append(ended))
        self._stuck = found[0].stuck
        return found[0].answer


def still_there(pid: int, started: int) -> bool:
    """Return whether that process has not ended yet; reap it if it was a child."""
    stat = _process_stat(pid)
    if stat is None or stat[1] != started:
        return False
    if stat[0] == "Z":
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        return False
    return True


def _be_the_child(work: Callable[[Mark], bytes], shared: mmap.mmap, write: int, parent: int) -> None:
    """Do the work of the child. Never returns."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)

        def mark(text: str) -> None:
            data = text.encode(errors="replace")[: _MARK_BYTES - 2]
            shared[: 2 + len(data)] = len(data).to_bytes(2, "little") + data

        data = work(mark) + b"\n"
        while data:
            data = data[os.write(write, data) :]
    finally:
        os._exit(0)


def _reaped(pid: int, slow_death_s: float) -> int | None:
    """Return the wait status; None if it has not died of the signal."""
    began = time.monotonic()
    while True:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return 0
        if done:
            return status
        waited = time.monotonic() - began
        if waited >= slow_death_s or (waited >= _DEATH_S and (_process_stat(pid) or "D")[0] == "D"):
            return None
        time.sleep(0.002)


def _stuck(pid: int) -> Stuck:
    state, started = _process_stat(pid) or ("?", 0)
    try:
        waits = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        waits = ""
    return Stuck(pid, started, f"state {state}" + (f" in {waits}" if waits not in ("", "0") else ""))


def _process_stat(pid: int) -> tuple[str, int] | None:
    """Return (state, start time)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return None
