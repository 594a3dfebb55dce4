"""Continues stopped (SIGSTOP) helper processes, and kills those that are stopped again.

A stopped helper answers nothing, as if its file system hung; the kernel tells the two apart. Its ``ChildLink`` or
``Storage`` notices the end of a killed one, and starts another.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

from msgspec import Struct

from resilio_hpc.core import process_title
from resilio_hpc.launch.process import process_tree

LOOK_S = 2.0
PATIENCE_S = 4.0  # a job that Slurm resumes continues its processes one after the other
STORE = "store"  # a child of the process that forks ranks
_MODULE = re.compile(rb"resilio_hpc\.(?:\w+\.)*(\w+)")


class _Stopped(Struct):
    since: float
    continued: bool = False


class HelperWatch:
    """Watches this process's own children, and the ranks' stores.

    ``tell(name, pid, action)`` is called with "continued" or "killed".
    """

    def __init__(
        self,
        tell: Callable[[str, int, str], None],
        spared: Callable[[], Collection[int]] = tuple,
        look_s: float = LOOK_S,
        patience_s: float = PATIENCE_S,
        proc: Path = process_tree.PROC,
    ) -> None:
        """Take ``spared``: a function that returns the helpers that this package itself has stopped."""
        self._tell, self._spared = tell, spared
        self._look_s, self._patience_s, self._proc = look_s, patience_s, proc
        self._next_look = float("-inf")
        self._stopped: dict[int, _Stopped] = {}

    def tick(self, now: float | None = None) -> None:
        """Look at the helpers when it is due; ``now``: monotonic seconds."""
        now = time.monotonic() if now is None else now
        if now < self._next_look:
            return
        self._next_look = now + self._look_s
        spared = set(self._spared())
        own = process_tree.children(os.getpid(), self._proc)
        below = [pid for child in own for pid in process_tree.children(child, self._proc)]
        stopped = {pid for pid in own if pid not in spared and self._is_stopped(pid)}
        stopped |= {pid for pid in below if self._is_stopped(pid) and self._name(pid) == STORE}
        children = {*own, *below}
        for pid, known in list(self._stopped.items()):
            if pid not in stopped and not (known.continued and pid in children):
                del self._stopped[pid]
        for pid in stopped:
            known = self._stopped.setdefault(pid, _Stopped(now))
            if now - known.since >= self._patience_s and (name := self._name(pid)):
                self._mend(pid, name, known, now)

    def _is_stopped(self, pid: int) -> bool:
        return process_tree.stat(pid, self._proc)[:1] == [b"T"]

    def _mend(self, pid: int, name: str, known: _Stopped, now: float) -> None:
        number = signal.SIGKILL if known.continued else signal.SIGCONT
        self._tell(name, pid, "killed" if known.continued else "continued")
        known.since, known.continued = now, True
        process_tree.send([pid], number)

    def _name(self, pid: int) -> str:
        """Return which helper it is; "" for other processes, such as those of a rank."""
        try:
            line = (self._proc / str(pid) / "cmdline").read_bytes()
        except OSError:
            return ""
        found = _MODULE.findall(line)  # it has no title yet
        return process_title.helper_in(line) or (found[0].decode() if found else "")
