"""NVIDIA's GPUs by NVML, through the reader that health checks use. Other makers' GPUs have no reader yet."""

from __future__ import annotations

import functools
import operator

from resilio_hpc.core import gpu_throttling
from resilio_hpc.core.errors import ResilioError
from resilio_hpc.metrics.sheet import Sheet
from resilio_hpc.prolog_epilog.base.node import NodeView
from resilio_hpc.prolog_epilog.checks import gpu_readings
from resilio_hpc.prolog_epilog.checks.gpu_readings import Gpu

FIELDS = (
    "minor", "memory_used", "memory_total", "temperature_c", "throttle", "ecc_uncorrected", "remap_pending",
    "pcie_replays", *gpu_readings.LIVE,
)  # fmt: skip
LINKS = ("nvlinks", "nvlink_errors")
LINKS_EVERY = 6  # samples: a GPU has 18 links with three counters each


class GpuSource:
    """Reads them; a node without NVIDIA's GPUs or library has none, and is not asked again."""

    def __init__(self, node: NodeView) -> None:
        self._node = node
        self._expected: int | None = None
        self._reads = 0
        self._links: dict[str, tuple[int, int]] = {}  # GPU → links that are up, errors of all
        self.trouble = ""
        """Why the GPUs cannot be read, or ""."""

    def read(self) -> Sheet:
        """Return a sheet."""
        sheet = Sheet()
        try:
            if self._expected is None:
                self._expected = gpu_readings.count_on_bus(self._node.files)
            if self._expected == 0:
                return sheet
            with_links = self._reads % LINKS_EVERY == 0
            self._reads += 1
            found = gpu_readings.ask(self._node, self._expected, FIELDS + (LINKS if with_links else ()))
        except ResilioError as error:
            self.trouble = str(error)
            if self._reads:  # NVML is not installed
                self._expected = 0
            return sheet
        self.trouble = found.trouble
        for gpu in found.gpus:
            name = str(gpu.slurm_index)
            if with_links and gpu.nvlinks:
                self._links[name] = sum(gpu.nvlinks.values()), sum(gpu.nvlink_errors.values())
            self._put(sheet, gpu, name)
        return sheet

    def _put(self, sheet: Sheet, gpu: Gpu, name: str) -> None:
        sheet.put("gpu_lost", int(bool(gpu.lost)), name)
        if gpu.lost:
            return
        sheet.put("gpu_utilization_ratio", _scaled(gpu.utilization_percent, 0.01), name)
        sheet.put("gpu_memory_used_bytes", gpu.memory_used, name)
        sheet.put("gpu_memory_total_bytes", gpu.memory_total, name)
        sheet.put("gpu_temperature_celsius", gpu.temperature_c, name)
        sheet.put("gpu_power_watts", _scaled(gpu.power_mw, 1e-3), name)
        sheet.put("gpu_sm_clock_hertz", _scaled(gpu.sm_clock_mhz, 1e6), name)
        sheet.put("gpu_memory_clock_hertz", _scaled(gpu.memory_clock_mhz, 1e6), name)
        sheet.put("gpu_throttle_reasons", gpu.throttle, name)
        sheet.put("gpu_ecc_uncorrected_total", gpu.ecc_uncorrected, name)
        sheet.put("gpu_ecc_corrected_total", gpu.ecc_corrected, name)
        sheet.put("gpu_remap_pending", None if gpu.remap_pending is None else int(gpu.remap_pending), name)
        sheet.put("gpu_pcie_replays_total", gpu.pcie_replays, name)
        if name in self._links:
            up, errors = self._links[name]
            sheet.put("gpu_nvlinks_active", up, name)
            sheet.put("gpu_nvlink_errors_total", errors, name)


def _scaled(value: int | None, factor: float) -> float | None:
    return None if value is None else value * factor


def throttled(sheet: Sheet) -> tuple[int, int]:
    """Return how many GPUs are throttled by what does not belong to their usual work, and the bits of why."""
    found = [
        bits for value in sheet.labelled("gpu_throttle_reasons").values() if (bits := int(value) & gpu_throttling.ALL)
    ]
    return len(found), functools.reduce(operator.or_, found, 0)
