"""How the spawner ends its ranks: the signal, the grace, SIGKILL, and when everything is gone."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from resilio_hpc.launch.process import process_tree, shared_memory
from resilio_hpc.launch.workers.forking.spawned_processes import SpawnedProcesses
from resilio_hpc.launch.workers.forking.spawner_messages import AllStopped, SpawnerEvent, Stop, StopFailed


class RankStop:
    """One order to stop, until no rank is left. ``begun``: when the first order came, in monotonic seconds."""

    def __init__(self, command: Stop, processes: SpawnedProcesses, begun: float) -> None:
        self.begun = begun
        self.over = False
        self._command = command
        self._processes = processes
        self._heeding: set[int] = set()  # with heeded_only: processes whose own ends are awaited
        self._killed_at: float | None = None
        self._segments: set[Path] = set()  # segments of shared memory that may be left
        self._reported = False
        self._kept = set(command.keep) & set(processes.ranks)

    def signal_ranks(self) -> None:
        """Send the signal, where there is a grace."""
        command = self._command
        if command.grace_s > 0 and not command.spare:
            if command.heeded_only:
                hearing = set(self._processes.hearing()) - self._kept
                self._heeding = {pid for pid in hearing if process_tree.handles(pid, command.signal)}
            for pid in set(self._processes.ranks) - self._kept:
                process_tree.signal_group(pid, command.signal)
                process_tree.signal_group(pid, signal.SIGCONT)  # a stopped rank cannot act on the first signal

    def looks_again_ms(self) -> float | None:
        """Return after how many milliseconds to call ``further`` though no process ended; None: not at all."""
        if self._killed_at is not None and self._reported:
            return None
        left = max(0.0, (self._deadline() - time.monotonic()) * 1000)
        looks_again = self._killed_at is not None or self._heeding or self._command.spare
        return min(left, 20.0) if looks_again else left

    def _deadline(self) -> float:
        grace = self.begun + self._command.grace_s
        return grace if self._killed_at is None else grace + self._command.kill_timeout_s

    def further(self) -> list[SpawnerEvent]:
        """Kill when the ranks are gone or the grace is over. Return what to report; ``over`` when no rank is left."""
        now = time.monotonic()
        if self._killed_at is None and self._waits(now):
            return []
        stores, first_kept = self._processes.stores, self._command.keep_stores_from
        self._processes.end_stores(max(stores.values(), default=0) + 1 if first_kept is None else first_kept)
        if self._killed_at is None:
            self._killed_at = now
        if self._command.spare:
            return [*self._processes.reap(), self._all_stopped()]
        left = self._kill(self._killed_at, now)
        events: list[SpawnerEvent] = [*self._processes.reap()]
        if not set(self._processes.children()) - set(stores) - self._kept:
            shared_memory.remove(self._segments)
            events.append(self._all_stopped())
        elif not self._reported and now >= self._deadline():
            self._reported = True
            events.append(StopFailed(tuple(left), now - self.begun))
        return events

    def _waits(self, now: float) -> bool:
        """Return whether a process should end by itself before anything is killed."""
        if self._command.spare:
            self._heeding |= set(self._processes.stores)  # the stores were not left by ranks
            self._processes.end_stores(1 << 30)
            left = self._processes.children()
            ours = any(pid in self._heeding or process_tree.is_tracker(pid) for pid in left)
            return bool(left) and now < self._deadline() + (process_tree.TRACKERS_S if ours else 0.0)
        if now >= self._deadline():
            return False
        if self._command.heeded_only:
            self._heeding = {pid for pid in self._heeding if process_tree.runs(pid)}
            return bool(self._heeding)
        return bool(set(self._processes.ranks) - self._kept)

    def _kill(self, killed_at: float, now: float) -> list[int]:
        """Kill everything but the stores; trackers get time to clean up after the others. Return what is left."""
        kept = {pid for rank in self._kept for pid in (rank, *process_tree.descendants(rank))}
        below = [pid for pid in self._processes.below_stores_excepted() if pid not in kept]
        self._segments |= self._processes.segments(below)
        if kept:
            self._segments -= self._processes.segments(list(kept))
        spared = set(self._processes.stores) | kept
        if now < killed_at + process_tree.TRACKERS_S:
            spared |= set(filter(process_tree.is_tracker, below))
        return self._processes.kill(spared)

    def _all_stopped(self) -> AllStopped:
        self.over = True
        return AllStopped(time.monotonic() - self.begun)
