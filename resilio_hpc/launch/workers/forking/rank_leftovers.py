"""Ends what a rank's process has left running, before the rank starts again alone.

Other ranks and what they have started live on. A left process is found by its session, or by the environment with
which it was executed; it is below no rank that runs. One in a session of its own without that environment may be
another rank's daemon, so it is spared: it ends with the round.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

from resilio_hpc.launch.process import process_tree, shared_memory
from resilio_hpc.launch.workers.forking.spawned_processes import SpawnedProcesses
from resilio_hpc.launch.workers.forking.spawner_messages import RankCommand

KILL_S = 5.0  # for processes to end after SIGKILL
LOOKS_MS = 20.0
_ENVIRON_BYTES = 1 << 20
_SESSION = 3  # field of ``process_tree.stat``


class RankLeftovers:
    """Processes that ranks have left. ``ended`` is asked again until it says so."""

    def __init__(self, processes: SpawnedProcesses) -> None:
        self._processes = processes
        self._since: dict[int, float] = {}  # process that left some → when they were looked for first
        self._segments: dict[int, frozenset[Path]] = {}

    def ended(self, command: RankCommand) -> tuple[bool, tuple[int, ...]]:
        """Kill what is left of the process ``command.after``.

        Return whether to wait no longer, and which processes outlive SIGKILL.
        """
        now = time.monotonic()
        left = self._left_by(command)
        waited = now - self._since.setdefault(command.after, now)
        killed = left if waited >= process_tree.TRACKERS_S else process_tree.without_trackers(left)
        if killed:
            held = self._processes.segments(killed)
            self._segments[command.after] = self._segments.get(command.after, frozenset()) | held
            process_tree.send(killed, signal.SIGKILL)
        if left and waited < KILL_S:
            return False, ()
        self._since.pop(command.after, None)
        shared_memory.remove(self._segments.pop(command.after, frozenset()))
        return True, tuple(left)

    def forget(self) -> None:
        """Take note that all ranks are being ended."""
        self._since.clear()
        self._segments.clear()

    def _left_by(self, command: RankCommand) -> list[int]:
        """Return the processes that run and are left by the last one of a rank, children after their parents."""
        spared = {*self._processes.ranks, *self._processes.stores}
        pending = [pid for pid in self._processes.children() if pid not in spared]
        variable = f"RESILIO_LOCAL_RANK={command.local_rank}".encode()
        found = [pid for pid in pending if _is_of(pid, command.after, variable)]
        return [pid for top in found for pid in (top, *process_tree.descendants(top)) if process_tree.runs(pid)]


def _is_of(pid: int, session: int, variable: bytes) -> bool:
    fields = process_tree.stat(pid)
    if len(fields) > _SESSION and int(fields[_SESSION]) == session:
        return True
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return variable in file.read(_ENVIRON_BYTES).split(b"\0")
    except OSError:
        return False  # it is gone, or belongs to another user
