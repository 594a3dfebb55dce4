"""The processes below the spawner: ranks, rendezvous stores, and what these have started."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from resilio_hpc.launch.process import process_tree, shared_memory
from resilio_hpc.launch.workers.forking.spawner_messages import Exited, Kind, Mode, StoreDied


class SpawnedRank(Struct, frozen=True):
    """A rank that was started."""

    local_rank: int
    mode: Mode
    kind: Kind


class SpawnedProcesses:
    """What runs below this process, the spawner. ``ranks`` by pid; ``stores``: pid → round.

    ``awaited``: pid → exit code once it has ended, of others whose ends are asked for.
    """

    def __init__(self) -> None:
        self.spawner = os.getpid()
        self.ranks: dict[int, SpawnedRank] = {}
        self.stores: dict[int, int] = {}
        self.awaited: dict[int, int | None] = {}
        self._began = time.time()

    def hearing(self) -> Iterator[int]:
        """Yield ranks that handle the signal; of a command also its children, since a shell passes no signal on."""
        for pid, rank in self.ranks.items():
            yield pid
            if rank.kind == "command":
                yield from process_tree.descendants(pid)

    def reap(self) -> list[Exited | StoreDied]:
        """Take the children that have ended; return what the agent has to know of them."""
        ends: list[Exited | StoreDied] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ends
            if pid == 0:
                return ends
            code = os.waitstatus_to_exitcode(status)
            if pid in self.awaited:
                self.awaited[pid] = code
            rank = self.ranks.pop(pid, None)
            if rank is not None:
                exit_code, number = (code, None) if code >= 0 else (None, -code)
                ends.append(Exited(rank.local_rank, pid, exit_code, number, time.time(), rank.mode))
            elif pid in self.stores:
                end = f"exit code {code}" if code >= 0 else f"signal {-code}"
                ends.append(StoreDied(self.stores.pop(pid), f"the store's process ended: {end}"))

    def children(self) -> list[int]:
        """Return the children of the spawner, stores included."""
        return process_tree.children(self.spawner)

    def below_stores_excepted(self) -> list[int]:
        """Return everything below the spawner but the stores."""
        return [pid for pid in process_tree.descendants(self.spawner) if pid not in self.stores]

    def segments(self, pids: list[int]) -> frozenset[Path]:
        """Return the segments of shared memory that these processes hold."""
        return shared_memory.held(pids, self._began)

    def end_stores(self, first_kept: int) -> None:
        """End the stores of rounds before ``first_kept``."""
        ended = [pid for pid, round in self.stores.items() if round < first_kept]
        for pid in ended:
            del self.stores[pid]  # so that its end is not reported
        process_tree.send(ended, signal.SIGKILL)

    def kill(self, spared: set[int]) -> list[int]:
        """Kill what runs below the spawner, but for ``spared``. Return what is left."""
        return process_tree.kill_descendants(self.spawner, frozenset(spared))

    def end_all(self) -> None:
        """End everything. Trackers are left alone: they end when they have cleaned up."""
        below = process_tree.descendants(self.spawner)
        segments = self.segments(below)
        self.kill(set(filter(process_tree.is_tracker, below)))
        if segments:
            process_tree.wait_for_ends(below, process_tree.TRACKERS_S)
            shared_memory.remove(segments)
