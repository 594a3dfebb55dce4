"""NVML's readings of a node's GPUs. A field that a GPU or driver does not know is None, never 0."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import msgspec

from resilio_hpc.prolog_epilog.base.check import Absent
from resilio_hpc.prolog_epilog.base.node import NodeView
from resilio_hpc.prolog_epilog.base.node_files import NodeFiles

_NVIDIA = 0x10DE
_DISPLAY = 0x03
"""PCI base class of VGA and 3D controllers (PCI Code and ID Assignment Specification)."""
_MOST_LINKS = 36
LIVE = ("ecc_corrected", "utilization_percent", "power_mw", "sm_clock_mhz", "memory_clock_mhz")
"""Fields of Gpu that no check of health needs; they are read only where they are asked for."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. Counters since the driver was loaded (volatile) or for ever (aggregate); sizes in bytes.

    ``index`` is NVML's, by PCI address; Slurm counts by device files, /dev/nvidia<minor>. ``instances``: MIG's UUIDs.
    ``unread``: by field, why it could not be read, which says nothing against the others.
    """

    index: int
    minor: int | None = None
    uuid: str = ""
    bus_id: str = ""
    lost: str = ""
    ecc_uncorrected: int | None = None
    sram_uncorrected: int | None = None
    sram_corrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retired_pending: bool | None = None
    nvlinks: dict[str, bool] = {}
    nvlink_errors: dict[str, int] = {}
    pcie_width: int | None = None
    pcie_most_width: int | None = None
    pcie_replays: int | None = None
    throttle: int | None = None
    temperature_c: int | None = None
    slowdown_c: int | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    processes: tuple[int, ...] | None = None
    mig: int | None = None
    mig_pending: int | None = None
    instances: tuple[str, ...] = ()
    persistence: int | None = None
    ecc_corrected: int | None = None
    utilization_percent: int | None = None
    power_mw: int | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    unread: dict[str, str] = {}

    @property
    def slurm_index(self) -> int:
        """Return the index of a GPU as SLURM_JOB_GPUS has it."""
        return self.index if self.minor is None else self.minor

    @property
    def name(self) -> str:
        """Return the device's name, for people, and for its eviction."""
        return self.uuid or self.bus_id or f"GPU-{self.index}"


class Gpus(msgspec.Struct, frozen=True):
    """All GPUs. ``expected``: the number by the site, or the PCI bus.

    ``trouble``: why the driver does not answer, or "".
    """

    expected: int
    gpus: tuple[Gpu, ...] = ()
    trouble: str = ""


def fetch(node: NodeView) -> Gpus:
    """Read the GPUs. Raises Absent where none exists and none is expected; Unreadable where NVML cannot be asked."""
    expected = int(node.settings["gpus"].number("count")) or count_on_bus(node.files)
    if expected == 0:
        raise Absent("no NVIDIA GPU on the PCI bus")
    return ask(node, expected)


def ask(node: NodeView, expected: int, wanted: Collection[str] | None = None) -> Gpus:
    """Read the GPUs that NVML has. Raises Unreadable where it is not installed.

    ``wanted``: fields of Gpu (default: all but LIVE).
    """
    nvml = node.nvml()
    node.mark("nvmlInit")
    try:
        nvml.nvmlInit()
        node.mark("nvmlDeviceGetCount")
        found = [_gpu(nvml, index, node.mark, wanted) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        return Gpus(expected, (), str(error))
    return Gpus(expected, tuple(one for one in found if one is not None))


def count_on_bus(files: NodeFiles) -> int:
    """Return the number of NVIDIA's display controllers on the PCI bus. Raises Unreadable."""
    count = 0
    for device in files.names("/sys/bus/pci/devices"):
        folder = f"/sys/bus/pci/devices/{device}"
        if files.number(f"{folder}/vendor") == _NVIDIA and files.number(f"{folder}/class") >> 16 == _DISPLAY:
            count += 1
    return count


def _gpu(nvml: Any, index: int, mark: Callable[[str], None], wanted: Collection[str] | None) -> Gpu | None:
    """Return a GPU; None for one that this process may not see (another job's).

    Raises the library's errors where it does not even tell a GPU's name, except those of a GPU that is lost.
    """
    try:
        mark(f"nvmlDeviceGetHandleByIndex of GPU {index}")
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        questions = _Questions(nvml, gpu, index, mark)
        uuid = questions.ask("nvmlDeviceGetUUID") or ""
        values, unread = questions.answers(wanted)
        return Gpu(index=index, uuid=str(uuid), unread=unread, **values)
    except nvml.NVMLError_NoPermission:
        return None
    except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired) as error:
        return Gpu(index=index, uuid=_last_name(nvml, index), lost=str(error))


def _last_name(nvml: Any, index: int) -> str:
    try:
        return str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)))
    except nvml.NVMLError:
        return ""


class _Questions:
    """The questions to NVML about one GPU. One that it cannot answer leaves the others."""

    def __init__(self, nvml: Any, gpu: Any, index: int, mark: Callable[[str], None]) -> None:
        self._nvml, self._gpu, self._index, self._mark = nvml, gpu, index, mark
        self._last = ""
        self._unknown = (
            nvml.NVMLError_NotSupported,
            nvml.NVMLError_FunctionNotFound,
            nvml.NVMLError_NoPermission,
            nvml.NVMLError_InvalidArgument,
            nvml.NVMLError_ArgumentVersionMismatch,
            nvml.NVMLError_NoData,
            nvml.NVMLError_NotFound,
        )

    def ask(self, name: str, *arguments: Any) -> Any:
        """Return the answer; None where this GPU or driver does not know the question.

        Raises the library's other errors.
        """
        self._last = name
        self._mark(f"{name} of GPU {self._index}")
        try:
            return getattr(self._nvml, name)(self._gpu, *arguments)
        except self._unknown:
            return None

    def answers(self, wanted: Collection[str] | None) -> tuple[dict[str, Any], dict[str, str]]:
        """Return, by field of Gpu, the values, and why others could not be read.

        Raises the errors of a GPU that is lost, and of a driver that is gone.
        """
        nvml = self._nvml
        ends = (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired, nvml.NVMLError_DriverNotLoaded)
        types = {field.name: field.type for field in msgspec.structs.fields(Gpu)}
        values: dict[str, Any] = {}
        unread: dict[str, str] = {}
        for name, question in self._fields().items():
            if name in LIVE if wanted is None else name not in wanted:
                continue
            try:
                value = question()
                if value is not None:
                    values[name] = msgspec.convert(value, types[name])
            except ends:
                raise
            except nvml.NVMLError as error:
                unread[name] = f"GPU {self._index}: {self._last}: {error}"
            except (msgspec.ValidationError, TypeError, ValueError, IndexError, AttributeError) as error:
                unread[name] = f"GPU {self._index}: {self._last} answers with what is no answer: {error}"
        return values, unread

    def _fields(self) -> dict[str, Callable[[], Any]]:
        nvml, ask = self._nvml, self.ask
        uncorrected, corrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
        sram = (nvml.NVML_AGGREGATE_ECC, nvml.NVML_MEMORY_LOCATION_SRAM)
        memory = partial(ask, "nvmlDeviceGetMemoryInfo", nvml.nvmlMemory_v2)  # v2: without the driver's own memory
        rows, mig = partial(ask, "nvmlDeviceGetRemappedRows"), partial(ask, "nvmlDeviceGetMigMode")
        return {
            "minor": partial(ask, "nvmlDeviceGetMinorNumber"),
            "bus_id": lambda: _of(ask("nvmlDeviceGetPciInfo"), lambda pci: _text(pci.busId)),
            "ecc_uncorrected": partial(ask, "nvmlDeviceGetTotalEccErrors", uncorrected, nvml.NVML_VOLATILE_ECC),
            "sram_uncorrected": partial(ask, "nvmlDeviceGetMemoryErrorCounter", uncorrected, *sram),
            "sram_corrected": partial(ask, "nvmlDeviceGetMemoryErrorCounter", corrected, *sram),
            "remap_pending": lambda: _of(rows(), lambda told: _flag(told[2])),
            "remap_failed": lambda: _of(rows(), lambda told: _flag(told[3])),
            "retired_pending": lambda: _of(ask("nvmlDeviceGetRetiredPagesPendingStatus"), _flag),
            "nvlinks": self._links,
            "nvlink_errors": self._link_errors,
            "pcie_width": partial(ask, "nvmlDeviceGetCurrPcieLinkWidth"),
            "pcie_most_width": partial(ask, "nvmlDeviceGetMaxPcieLinkWidth"),
            "pcie_replays": partial(ask, "nvmlDeviceGetPcieReplayCounter"),
            "throttle": partial(ask, "nvmlDeviceGetCurrentClocksThrottleReasons"),
            "temperature_c": partial(ask, "nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            "slowdown_c": partial(
                ask, "nvmlDeviceGetTemperatureThreshold", nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
            ),
            "memory_used": lambda: _of(memory(), lambda told: told.used),
            "memory_total": lambda: _of(memory(), lambda told: told.total),
            "processes": lambda: _of(
                ask("nvmlDeviceGetComputeRunningProcesses"), lambda told: [process.pid for process in told]
            ),
            "mig": lambda: _of(mig(), lambda told: told[0]),
            "mig_pending": lambda: _of(mig(), lambda told: told[1]),
            "instances": lambda: self._instances() if (mig() or [0])[0] == nvml.NVML_DEVICE_MIG_ENABLE else [],
            "persistence": partial(ask, "nvmlDeviceGetPersistenceMode"),
            "ecc_corrected": partial(ask, "nvmlDeviceGetTotalEccErrors", corrected, nvml.NVML_VOLATILE_ECC),
            "utilization_percent": lambda: _of(ask("nvmlDeviceGetUtilizationRates"), lambda told: told.gpu),
            "power_mw": partial(ask, "nvmlDeviceGetPowerUsage"),
            "sm_clock_mhz": partial(ask, "nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": partial(ask, "nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        }  # fmt: skip

    def _instances(self) -> list[str]:
        """Return UUIDs of the MIG devices of a GPU."""
        count = self.ask("nvmlDeviceGetMaxMigDeviceCount") or 0
        handles = [self.ask("nvmlDeviceGetMigDeviceHandleByIndex", at) for at in range(count)]
        return [str(self._nvml.nvmlDeviceGetUUID(handle)) for handle in handles if handle is not None]

    def _links(self) -> dict[str, bool]:
        """Return the NVLinks that the GPU has, and whether each is active."""
        active: dict[str, bool] = {}
        for link in range(min(self._nvml.NVML_NVLINK_MAX_LINKS, _MOST_LINKS)):
            state = self.ask("nvmlDeviceGetNvLinkState", link)
            if state is None:
                break
            active[str(link)] = _flag(state)
        return active

    def _link_errors(self) -> dict[str, int]:
        """Return the error counters of active NVLinks, where this generation still has them."""
        nvml = self._nvml
        kinds = {
            "replay": nvml.NVML_NVLINK_ERROR_DL_REPLAY,
            "recovery": nvml.NVML_NVLINK_ERROR_DL_RECOVERY,
            "crc": nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT,
        }
        errors: dict[str, int] = {}
        for link, active in self._links().items():
            for name, kind in kinds.items():
                count = self.ask("nvmlDeviceGetNvLinkErrorCounter", int(link), kind) if active else None
                if count is not None:
                    errors[f"{link} {name}"] = count
        return errors


def _of(told: Any, pick: Callable[[Any], Any]) -> Any:
    """Return a part of an answer; None without an answer."""
    return None if told is None else pick(told)


def _flag(value: Any) -> bool:
    """Return NVML's enable state, 0 or 1. Raises ValueError for any other value, which must not count as a fault."""
    if value not in (0, 1):
        raise ValueError(f"{value!r} is no state")
    return bool(value)


def _text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
