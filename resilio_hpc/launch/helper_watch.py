"""Helper processes of ours that somebody has stopped (SIGSTOP): found, continued, and replaced where that is no help.

A helper that was stopped answers nothing, as if its file system hung; but here the kernel tells which it is. Whoever
keeps it sees the end of one that is killed, and starts another.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.launch import process_tree

LOOK_S = 2.0
PATIENCE_S = 4.0  # a job that Slurm resumes continues its processes one after the other
_MODULE = re.compile(rb"resilio_hpc\.(?:\w+\.)*(\w+)")


@dataclass
class _Stopped:
    since: float
    continued: bool = False


class HelperWatch:
    """Looks at this process's own children. ``tell(name, pid, action)`` is called with "continued" or "killed"."""

    def __init__(
        self,
        tell: Callable[[str, int, str], None],
        spared: Callable[[], Collection[int]] = tuple,
        look_s: float = LOOK_S,
        patience_s: float = PATIENCE_S,
        proc: Path = process_tree.PROC,
    ) -> None:
        """``spared``: helpers that we have stopped ourselves."""
        self._tell, self._spared = tell, spared
        self._look_s, self._patience_s, self._proc = look_s, patience_s, proc
        self._next_look = float("-inf")
        self._stopped: dict[int, _Stopped] = {}

    def tick(self, now: float | None = None) -> None:
        """Look when it is time; ``now``: monotonic seconds."""
        now = time.monotonic() if now is None else now
        if now < self._next_look:
            return
        self._next_look = now + self._look_s
        spared = set(self._spared())
        children = process_tree.children(os.getpid(), self._proc)
        stopped = {pid for pid in children if pid not in spared and self._is_stopped(pid)}
        before = self._stopped.items()
        self._stopped = {
            pid: known for pid, known in before if pid in stopped or (known.continued and pid in children)
        }  # fmt: skip
        for pid in stopped:
            known = self._stopped.setdefault(pid, _Stopped(now))
            if now - known.since >= self._patience_s and (name := self._name(pid)):
                self._mend(pid, name, known, now)

    def _mend(self, pid: int, name: str, known: _Stopped, now: float) -> None:
        number = signal.SIGKILL if known.continued else signal.SIGCONT
        self._tell(name, pid, "killed" if known.continued else "continued")
        known.since, known.continued = now, True
        process_tree.send([pid], number)

    def _is_stopped(self, pid: int) -> bool:
        try:
            return (self._proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[:1] == [b"T"]
        except OSError:
            return False

    def _name(self, pid: int) -> str:
        """Which helper it is; "" for other processes, such as those of a rank."""
        try:
            found = _MODULE.findall((self._proc / str(pid) / "cmdline").read_bytes())
        except OSError:
            return ""
        return found[0].decode() if found else ""
