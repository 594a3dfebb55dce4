"""A fake of nvidia-ml-py (pynvml): it answers what a test said, and raises on everything else.

Names and numbers are those of nvml.h; test_fake_nvml.py compares them with the real module where that is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from resilio_hpc.metrics.gpus import GpuSource
from resilio_hpc.prolog_epilog.base.node import NodeView


class NVMLError(Exception):
    """As the library's, known by its class."""


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_FunctionNotFound(NVMLError):
    pass


class NVMLError_NoPermission(NVMLError):
    pass


class NVMLError_InvalidArgument(NVMLError):
    pass


class NVMLError_ArgumentVersionMismatch(NVMLError):
    pass


class NVMLError_NoData(NVMLError):
    pass


class NVMLError_NotFound(NVMLError):
    pass


class NVMLError_GpuIsLost(NVMLError):
    pass


class NVMLError_ResetRequired(NVMLError):
    pass


class NVMLError_Unknown(NVMLError):
    pass


class NVMLError_DriverNotLoaded(NVMLError):
    pass


CONSTANTS = {
    "NVML_MEMORY_ERROR_TYPE_CORRECTED": 0,
    "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
    "NVML_VOLATILE_ECC": 0,
    "NVML_AGGREGATE_ECC": 1,
    "NVML_MEMORY_LOCATION_SRAM": 7,
    "NVML_NVLINK_ERROR_DL_REPLAY": 0,
    "NVML_NVLINK_ERROR_DL_RECOVERY": 1,
    "NVML_NVLINK_ERROR_DL_CRC_FLIT": 2,
    "NVML_NVLINK_MAX_LINKS": 36,
    "NVML_TEMPERATURE_GPU": 0,
    "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN": 1,
    "nvmlMemory_v2": 33554472,
    "NVML_DEVICE_MIG_ENABLE": 1,
    "NVML_CLOCK_SM": 1,
    "NVML_CLOCK_MEM": 2,
}
ERRORS = [
    NVMLError_NotSupported,
    NVMLError_FunctionNotFound,
    NVMLError_NoPermission,
    NVMLError_InvalidArgument,
    NVMLError_ArgumentVersionMismatch,
    NVMLError_NoData,
    NVMLError_NotFound,
    NVMLError_GpuIsLost,
    NVMLError_ResetRequired,
    NVMLError_DriverNotLoaded,
    NVMLError_Unknown,
]
GIB = 2**30


def healthy_gpu(index: int) -> dict[str, Any]:
    """What each question about one GPU is answered with; an exception is raised instead."""
    return {
        "nvmlDeviceGetUUID": f"GPU-0000000{index}-aaaa-bbbb-cccc-dddddddddddd",
        "nvmlDeviceGetMinorNumber": index,
        "nvmlDeviceGetPciInfo": SimpleNamespace(busId=f"00000000:{0x1B + index:02X}:00.0"),
        "nvmlDeviceGetTotalEccErrors": 0,
        "nvmlDeviceGetMemoryErrorCounter": 0,
        "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
        "nvmlDeviceGetRetiredPagesPendingStatus": NVMLError_NotSupported("Not Supported"),
        "nvmlDeviceGetNvLinkState": lambda link: 1 if link < 18 else _raise(NVMLError_InvalidArgument()),
        "nvmlDeviceGetNvLinkErrorCounter": lambda link, kind: 0,
        "nvmlDeviceGetCurrPcieLinkWidth": 16,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
        "nvmlDeviceGetPcieReplayCounter": 0,
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0x1,
        "nvmlDeviceGetTemperature": 40,
        "nvmlDeviceGetTemperatureThreshold": 87,
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=4 * 2**20, total=80 * GIB),
        "nvmlDeviceGetComputeRunningProcesses": [],
        "nvmlDeviceGetMigMode": [0, 0],
        "nvmlDeviceGetMaxMigDeviceCount": 2,
        "nvmlDeviceGetMigDeviceHandleByIndex": lambda at: (
            {"nvmlDeviceGetUUID": f"MIG-{index}{at}-cccc"} if at == 0 else _raise(NVMLError_NotFound())
        ),
        "nvmlDeviceGetPersistenceMode": 1,
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=40),
        "nvmlDeviceGetPowerUsage": 651_000,
        "nvmlDeviceGetClockInfo": lambda kind: {1: 1980, 2: 2619}[kind],
    }


def _raise(error: Exception) -> Any:
    raise error


class FakeNvml:
    """Two healthy GPUs; ``changes`` of the second one. A name that it does not know raises AttributeError."""

    def __init__(self, changes: dict[str, Any] | None = None, count: int = 2, init: Exception | None = None) -> None:
        self._gpus = [healthy_gpu(index) for index in range(count)]
        if self._gpus:
            self._gpus[-1] |= changes or {}
        self._init = init
        self.NVMLError = NVMLError
        for error in ERRORS:
            setattr(self, error.__name__, error)
        for name, value in CONSTANTS.items():
            setattr(self, name, value)

    def nvmlInit(self) -> None:
        if self._init:
            raise self._init

    def nvmlDeviceGetCount(self) -> int:
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        lost = self._gpus[index].get("nvmlDeviceGetHandleByIndex")
        if lost:
            raise lost
        return self._gpus[index]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in healthy_gpu(0):
            raise AttributeError(f"the fake NVML does not know {name}")

        def answer(gpu: dict[str, Any], *arguments: Any) -> Any:
            value = gpu[name]
            if isinstance(value, Exception):
                raise value
            return value(*arguments) if callable(value) else value

        return answer


def gpu_source(folder: Path, nvml: FakeNvml) -> GpuSource:
    """Return a reader of a node with two GPUs on its bus, whose NVML is a fake."""
    for number in range(2):
        place = folder / f"sys/bus/pci/devices/0000:{number}b:00.0"
        place.mkdir(parents=True)
        (place / "vendor").write_text("0x10de\n")
        (place / "class").write_text("0x030200\n")
    return GpuSource(NodeView(root=folder, nvml=lambda: nvml))
