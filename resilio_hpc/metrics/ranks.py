"""The processes of a node's ranks, and their calls of communication libraries."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from resilio_hpc.metrics.memory_watch import MemoryUsed
from resilio_hpc.metrics.messages import RankFacts
from resilio_hpc.metrics.sheet import Sheet

if TYPE_CHECKING:
    from resilio_hpc.diagnose.hangs.call_counts import CallCounter

_UNLIMITED = 1 << 62


class RankSource:
    """Reads them. ``limits``: the ranks whose address space is limited (``ulimit -v``), and how much they use."""

    def __init__(self) -> None:
        self.limits: list[MemoryUsed] = []
        self._processes: dict[int, psutil.Process] = {}
        self._counters: dict[str, CallCounter] = {}

    def read(self, ranks: Sequence[RankFacts]) -> Sheet:
        """Return a sheet."""
        sheet, limits = Sheet(), []
        for gone in self._processes.keys() - {rank.pid for rank in ranks}:
            del self._processes[gone]
        for path in self._counters.keys() - {rank.ring for rank in ranks}:
            self._counters.pop(path).close()
        for rank in ranks:
            limits += self._process(sheet, rank)
            sheet.put("rank_step", rank.step if rank.step >= 0 else None, rank.rank)
            sheet.put("rank_step_seconds", rank.step_s if rank.step_s > 0 else None, rank.rank)
            with contextlib.suppress(OSError):  # it makes no calls that are seen, or ended just now
                self._calls(sheet, rank)
        self.limits = limits
        return sheet

    def _process(self, sheet: Sheet, rank: RankFacts) -> list[MemoryUsed]:
        try:
            process = self._processes.get(rank.pid) or psutil.Process(rank.pid)
            self._processes[rank.pid] = process
            memory, times = process.memory_info(), process.cpu_times()
            limit = process.rlimit(psutil.RLIMIT_AS)[0]
        except psutil.Error:  # it ended, or is not ours to ask
            self._processes.pop(rank.pid, None)
            return []
        sheet.put("rank_resident_bytes", memory.rss, rank.rank)
        sheet.put("rank_cpu_seconds_total", times.user + times.system, rank.rank)
        return [MemoryUsed(f"rank {rank.rank}", memory.vms, limit)] if 0 < limit < _UNLIMITED else []

    def _calls(self, sheet: Sheet, rank: RankFacts) -> None:
        if not rank.ring or not Path(rank.ring).exists():
            return
        # imported here, since numpy takes a while, and ranks may make no calls that are seen
        from resilio_hpc.diagnose.hangs.call_counts import CallCounter

        counter = self._counters.get(rank.ring) or CallCounter(Path(rank.ring))
        if counter.process != rank.pid:  # a program that the rank started was first, or the rank is another by now
            counter.close()
            self._counters.pop(rank.ring, None)
            return
        self._counters[rank.ring] = counter
        counts = counter.look(time.monotonic_ns())
        sheet.put("rank_calls_begun_total", counts.begun, rank.rank)
        sheet.put("rank_calls_completed_total", counts.completed, rank.rank)
        for op, number in counts.calls.items():
            sheet.put("rank_op_calls_total", round(number), rank.rank, op)
            size = counts.size_bytes[op]
            sheet.put("rank_op_bytes_total", round(size) if size else None, rank.rank, op)
        if counts.knows_ends:
            sheet.put("rank_collective_seconds_total", counts.in_calls_s, rank.rank)


def largest(sheet: Sheet) -> tuple[str, float]:
    """Return the rank with the most memory, and how much that is; "" without one."""
    sizes = sheet.labelled("rank_resident_bytes")
    name = max(sizes, key=lambda rank: sizes[rank], default="")
    return (f"rank {name}", sizes[name]) if name else ("", 0.0)
