"""What NVML tells of a node's GPUs. A GPU or driver that does not know a question leaves None, never 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from resilio_hpc.prolog_epilog.check import Absent, Unreadable
from resilio_hpc.prolog_epilog.node import Node
from resilio_hpc.prolog_epilog.node_files import NodeFiles

_NVIDIA = 0x10DE
_DISPLAY = 0x03
"""PCI base class of VGA and 3D controllers (PCI Code and ID Assignment Specification)."""
_MOST_LINKS = 36


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. Counters since the driver was loaded (volatile) or for ever (aggregate); sizes in bytes.

    ``index`` is NVML's, by PCI address; Slurm counts by device files, /dev/nvidia<minor>. ``instances``: MIG's UUIDs.
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

    @property
    def slurm_index(self) -> int:
        """As in SLURM_JOB_GPUS."""
        return self.index if self.minor is None else self.minor

    @property
    def name(self) -> str:
        """Of the device, for people and for whoever takes it out of use."""
        return self.uuid or self.bus_id or f"GPU-{self.index}"


class Gpus(msgspec.Struct, frozen=True):
    """``expected``: as the site says, or the PCI bus shows. ``trouble``: why the driver does not answer, or ""."""

    expected: int
    gpus: tuple[Gpu, ...] = ()
    trouble: str = ""


def fetch(node: Node) -> Gpus:
    """Raises Absent where there is no NVIDIA GPU and none is expected; Unreadable where NVML cannot be asked."""
    expected = int(node.settings["gpus"].number("count")) or count_on_bus(node.files)
    if expected == 0:
        raise Absent("no NVIDIA GPU on the PCI bus")
    nvml = node.nvml()
    node.mark("nvmlInit")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Gpus(expected, (), str(error))
    try:
        node.mark("nvmlDeviceGetCount")
        count = nvml.nvmlDeviceGetCount()
        found = [_gpu(nvml, index, node.mark) for index in range(count)]
        allowed = [one for one in found if one is not None]
        return msgspec.convert({"expected": expected, "gpus": allowed}, Gpus)
    except nvml.NVMLError as error:
        return Gpus(expected, (), str(error))
    except (msgspec.ValidationError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise Unreadable(f"NVML answers with what is no answer: {error}") from error


def count_on_bus(files: NodeFiles) -> int:
    """NVIDIA's display controllers on the PCI bus. Raises Unreadable."""
    count = 0
    for device in files.names("/sys/bus/pci/devices"):
        folder = f"/sys/bus/pci/devices/{device}"
        if files.number(f"{folder}/vendor") == _NVIDIA and files.number(f"{folder}/class") >> 16 == _DISPLAY:
            count += 1
    return count


def _gpu(nvml: Any, index: int, mark: Callable[[str], None]) -> dict[str, Any] | None:
    """None for one that this process may not see (another job's). Raises the library's errors, but those of a GPU that
    is lost."""
    try:
        mark(f"nvmlDeviceGetHandleByIndex of GPU {index}")
        return {"index": index, **_asked(nvml, nvml.nvmlDeviceGetHandleByIndex(index), index, mark)}
    except nvml.NVMLError_NoPermission:
        return None
    except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired) as error:
        return {"index": index, "uuid": _last_name(nvml, index), "lost": str(error)}


def _last_name(nvml: Any, index: int) -> str:
    try:
        return str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)))
    except nvml.NVMLError:
        return ""


def _asked(nvml: Any, gpu: Any, index: int, mark: Callable[[str], None]) -> dict[str, Any]:
    unknown = (
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_FunctionNotFound,
        nvml.NVMLError_NoPermission,
        nvml.NVMLError_InvalidArgument,
        nvml.NVMLError_ArgumentVersionMismatch,
        nvml.NVMLError_NoData,
        nvml.NVMLError_NotFound,
    )

    def ask(name: str, *arguments: Any) -> Any:
        mark(f"{name} of GPU {index}")
        try:
            return getattr(nvml, name)(gpu, *arguments)
        except unknown:
            return None

    uncorrected, corrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
    aggregate, sram = nvml.NVML_AGGREGATE_ECC, nvml.NVML_MEMORY_LOCATION_SRAM
    memory = ask("nvmlDeviceGetMemoryInfo", nvml.nvmlMemory_v2)  # v2 leaves out what the driver keeps for itself
    rows = ask("nvmlDeviceGetRemappedRows")
    mig = ask("nvmlDeviceGetMigMode")
    retired = ask("nvmlDeviceGetRetiredPagesPendingStatus")
    running = ask("nvmlDeviceGetComputeRunningProcesses")
    pci = ask("nvmlDeviceGetPciInfo")
    return {
        "uuid": ask("nvmlDeviceGetUUID") or "",
        "minor": ask("nvmlDeviceGetMinorNumber"),
        "bus_id": "" if pci is None else _text(pci.busId),
        "ecc_uncorrected": ask("nvmlDeviceGetTotalEccErrors", uncorrected, nvml.NVML_VOLATILE_ECC),
        "sram_uncorrected": ask("nvmlDeviceGetMemoryErrorCounter", uncorrected, aggregate, sram),
        "sram_corrected": ask("nvmlDeviceGetMemoryErrorCounter", corrected, aggregate, sram),
        "remap_pending": None if rows is None else _flag(rows[2]),
        "remap_failed": None if rows is None else _flag(rows[3]),
        "retired_pending": None if retired is None else _flag(retired),
        **_links(nvml, ask),
        "pcie_width": ask("nvmlDeviceGetCurrPcieLinkWidth"),
        "pcie_most_width": ask("nvmlDeviceGetMaxPcieLinkWidth"),
        "pcie_replays": ask("nvmlDeviceGetPcieReplayCounter"),
        "throttle": ask("nvmlDeviceGetCurrentClocksThrottleReasons"),
        "temperature_c": ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        "slowdown_c": ask("nvmlDeviceGetTemperatureThreshold", nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        "memory_used": None if memory is None else memory.used,
        "memory_total": None if memory is None else memory.total,
        "processes": None if running is None else [process.pid for process in running],
        "mig": None if mig is None else mig[0],
        "mig_pending": None if mig is None else mig[1],
        "instances": _instances(nvml, ask) if mig is not None and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE else [],
        "persistence": ask("nvmlDeviceGetPersistenceMode"),
    }


def _instances(nvml: Any, ask: Callable[..., Any]) -> list[str]:
    """UUIDs of the MIG devices of a GPU."""
    handles = [
        ask("nvmlDeviceGetMigDeviceHandleByIndex", at) for at in range(ask("nvmlDeviceGetMaxMigDeviceCount") or 0)
    ]
    return [str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles if handle is not None]


def _links(nvml: Any, ask: Callable[..., Any]) -> dict[str, Any]:
    """NVLinks that the GPU has, and their error counters where this generation still counts them."""
    active: dict[str, bool] = {}
    errors: dict[str, int] = {}
    kinds = {
        "replay": nvml.NVML_NVLINK_ERROR_DL_REPLAY,
        "recovery": nvml.NVML_NVLINK_ERROR_DL_RECOVERY,
        "crc": nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT,
    }
    for link in range(min(nvml.NVML_NVLINK_MAX_LINKS, _MOST_LINKS)):
        state = ask("nvmlDeviceGetNvLinkState", link)
        if state is None:
            break
        active[str(link)] = _flag(state)
        for name, kind in kinds.items():
            count = ask("nvmlDeviceGetNvLinkErrorCounter", link, kind) if state else None
            if count is not None:
                errors[f"{link} {name}"] = count
    return {"nvlinks": active, "nvlink_errors": errors}


def _flag(value: Any) -> bool:
    """NVML's enable states are 0 and 1. Raises ValueError for anything else: whatever is true in Python is no fault."""
    if value not in (0, 1):
        raise ValueError(f"{value!r} is no state")
    return bool(value)


def _text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
