"""Processors, memory and pressure of a node, and the memory of its job's cgroup."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil

from resilio_hpc.core.errors import ResilioError
from resilio_hpc.core.memory_left import memory_uses, oom_kills
from resilio_hpc.metrics.sheet import Sheet
from resilio_hpc.prolog_epilog.base.node_files import NodeFiles

_TOTAL = re.compile(r"^(some|full) .*\btotal=(\d{1,18})$", re.MULTILINE)
_PRESSURE = {
    ("cpu", "some"): "host_cpu_waiting_seconds_total",
    ("memory", "some"): "host_memory_waiting_seconds_total",
    ("memory", "full"): "host_memory_stalled_seconds_total",
    ("io", "some"): "host_io_waiting_seconds_total",
}


class HostSource:
    """Reads the node's own values. ``root``: below which files are, except those that psutil reads."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._files = NodeFiles(root)
        self._before: tuple[float, float, float] | None = None  # seconds of all processors: all, idle, waiting

    def read(self, process: int | str = "self") -> Sheet:
        """Return a sheet. ``process``: in the cgroup that counts, such as a rank's."""
        sheet = Sheet()
        self._cpu(sheet)
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        sheet.put("host_memory_total_bytes", memory.total)
        sheet.put("host_memory_available_bytes", memory.available)
        sheet.put("host_memory_shared_bytes", memory.shared)
        sheet.put("host_swap_used_bytes", swap.used)
        sheet.put("host_load1", os.getloadavg()[0])
        sheet.put("host_processors", len(os.sched_getaffinity(0)))
        for (resource, kind), name in _PRESSURE.items():
            sheet.put(name, self._pressure_s(resource).get(kind))
        in_job, on_host = oom_kills(self._root, process)
        sheet.put("host_oom_kills_total", on_host)
        sheet.put("job_oom_kills_total", in_job)
        uses = memory_uses(self._root, process)
        if uses:
            tightest = min(uses, key=lambda use: use.limit_bytes - use.used_bytes)
            sheet.put("job_memory_limit_bytes", tightest.limit_bytes)
            sheet.put("job_memory_used_bytes", tightest.used_bytes)
        return sheet

    def _cpu(self, sheet: Sheet) -> None:
        times = psutil.cpu_times()
        in_guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # they count as user time, too
        now = (sum(times) - in_guests, times.idle, getattr(times, "iowait", 0.0))
        before, self._before = self._before, now
        if before is None or now[0] <= before[0]:
            return
        total, idle, waiting = (new - old for new, old in zip(now, before, strict=True))
        sheet.put("host_cpu_used_ratio", _share(total - idle - waiting, total))
        sheet.put("host_cpu_iowait_ratio", _share(waiting, total))

    def _pressure_s(self, resource: str) -> dict[str, float]:
        try:
            text = self._files.optional(f"/proc/pressure/{resource}") or ""
        except ResilioError:  # a kernel with psi=0 answers EOPNOTSUPP
            return {}
        return {kind: int(microseconds) / 1e6 for kind, microseconds in _TOTAL.findall(text)}


def _share(part: float, total: float) -> float:
    return min(max(part / total, 0.0), 1.0)  # the kernel's idle and waiting times may go backwards
