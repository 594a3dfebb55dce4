"""How many ranks a node can hold: GPUs and CPUs counted from /dev, /sys and the environment, without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.core.errors import UsageError


@dataclass(frozen=True)
class NodeDevices:
    """What this process may use on this node. ``memory_bytes`` 0: unknown."""

    gpus: int
    xpus: int
    cpus: int
    memory_bytes: int


def read_devices(environment: Mapping[str, str], root: Path = Path("/")) -> NodeDevices:
    """Look at this node. ``root`` is / but in tests."""
    nvidia = sum(1 for path in _entries(root / "dev") if re.fullmatch(r"nvidia\d+", path.name))
    amd = sum(
        1 for node in _entries(root / "sys/class/kfd/kfd/topology/nodes") if _text(node / "gpu_id") not in ("", "0")
    )
    present = nvidia or amd
    intel = sum(
        1
        for card in _entries(root / "sys/class/drm")
        if re.fullmatch(r"card\d+", card.name)
        and _text(card / "device/vendor") == "0x8086"
        and _text(card / "device/class").startswith("0x0380")  # display controllers that drive no screen
    )
    names = (
        ("CUDA_VISIBLE_DEVICES",) if nvidia else ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    )
    selected = next((environment[name] for name in names if name in environment), None)
    return NodeDevices(
        gpus=visible_count(selected, present),
        xpus=intel,
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=_available_memory(root),
    )


def visible_count(selected: str | None, present: int) -> int:
    """GPUs that a ``CUDA_VISIBLE_DEVICES`` value leaves of ``present`` ones; the list ends at the first wrong entry."""
    if selected is None or present == 0:
        return present
    count = 0
    for entry in (part.strip() for part in selected.split(",")):
        whole_gpu = entry.isdecimal() and int(entry) < present
        if not whole_gpu and not entry.startswith(("GPU-", "MIG-")):
            break
        count += 1
    return count


def local_world_size(nproc_per_node: str, devices: NodeDevices) -> int:
    """Ranks on a node: the number given, or what auto, gpu, xpu and cpu mean here. Raises UsageError.

    As with torchrun, ``auto`` is one rank per GPU, and one per usable CPU where there is none.
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
