"""How many ranks a node can hold: GPUs and CPUs counted from /dev, /sys and the environment, without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.core.errors import UsageError

NVIDIA = "CUDA_VISIBLE_DEVICES"
AMD = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
MOST_DEVICES = 64


@dataclass(frozen=True)
class NodeDevices:
    """What this process may use on this node. ``memory_bytes`` 0: unknown."""

    gpus: int
    xpus: int
    cpus: int
    memory_bytes: int


@dataclass(frozen=True)
class VisibleDevices:
    """The GPUs of this process: ``entries`` as in ``variable``. The n-th is that of local rank n."""

    variable: str
    entries: tuple[str, ...]
    restricted: bool  # the variable is set


def visible_devices(environment: Mapping[str, str], root: Path = Path("/")) -> VisibleDevices:
    """Return which GPUs ranks see.

    Without a known device file (none exists, or it is another maker's), the variable alone tells.
    """
    nvidia, amd = _counts(root)
    names = _variables(nvidia)
    variable = next((name for name in names if name in environment), names[0] if nvidia or not amd else AMD[0])
    selected, present = environment.get(variable), nvidia or amd
    if selected is None:
        return VisibleDevices(variable, tuple(map(str, range(present))), False)
    return VisibleDevices(variable, _entries_of(selected, present or MOST_DEVICES), True)


def read_devices(environment: Mapping[str, str], root: Path = Path("/")) -> NodeDevices:
    """Return the devices of this node. ``root`` is / except in tests."""
    nvidia, amd = _counts(root)
    present = nvidia or amd or _granted(environment)
    intel = sum(
        1
        for card in _entries(root / "sys/class/drm")
        if re.fullmatch(r"card\d+", card.name)
        and _text(card / "device/vendor") == "0x8086"
        and _text(card / "device/class").startswith("0x0380")  # display controllers without a screen
    )
    selected = next((environment[name] for name in _variables(nvidia) if name in environment), None)
    return NodeDevices(
        gpus=visible_count(selected, present),
        xpus=intel,
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=_available_memory(root),
    )


def _counts(root: Path) -> tuple[int, int]:
    """Return the numbers of NVIDIA's and of AMD's GPUs."""
    nvidia = sum(1 for path in _entries(root / "dev") if re.fullmatch(r"nvidia\d+", path.name))
    nodes = _entries(root / "sys/class/kfd/kfd/topology/nodes")
    return nvidia, sum(1 for node in nodes if _text(node / "gpu_id") not in ("", "0"))


def _granted(environment: Mapping[str, str]) -> int:
    """Return how many GPUs Slurm has granted on this node; 0 outside of Slurm.

    It counts where no device file is known: the fake GPUs of a dev cluster, or another maker's.
    """
    text = environment.get("SLURM_GPUS_ON_NODE", "")
    return int(text) if text.isdecimal() else 0


def _variables(nvidia: int) -> tuple[str, ...]:
    """Return the variables that select a process's GPUs; the first one that is set counts."""
    return (NVIDIA,) if nvidia else AMD


def visible_count(selected: str | None, present: int) -> int:
    """Return how many of ``present`` GPUs a ``CUDA_VISIBLE_DEVICES`` value leaves.

    The value counts up to its first invalid entry.
    """
    if selected is None or present == 0:
        return present
    return len(_entries_of(selected, present))


def _entries_of(selected: str, present: int) -> tuple[str, ...]:
    entries: list[str] = []
    for entry in (part.strip() for part in selected.split(",")):
        whole_gpu = entry.isdecimal() and int(entry) < present
        if not whole_gpu and not entry.startswith(("GPU-", "MIG-")):
            break
        entries.append(entry)
    return tuple(entries)


def local_world_size(nproc_per_node: str, devices: NodeDevices) -> int:
    """Return the ranks on a node: the number given, or what auto, gpu, xpu and cpu mean here. Raises UsageError.

    As with torchrun, ``auto`` is one rank per GPU, and one per usable CPU where there is no GPU.
    """
    if nproc_per_node.isdecimal():
        return int(nproc_per_node)
    if nproc_per_node == "gpu" and devices.gpus == 0:
        raise UsageError(
            "--nproc-per-node gpu: no GPU is visible here; give a number, or ask Slurm for --gpus-per-node"
        )
    if nproc_per_node == "xpu" and devices.xpus == 0:
        raise UsageError("--nproc-per-node xpu: no Intel GPU is visible here; give a number")
    accelerators = devices.xpus if nproc_per_node == "xpu" else devices.gpus or devices.xpus
    return devices.cpus if nproc_per_node == "cpu" else accelerators or devices.cpus


def _available_memory(root: Path) -> int:
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
