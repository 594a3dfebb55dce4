"""Gathers what a node is like, in a process of its own: ``python -m resilio_hpc.launch.environment.facts REQUEST``.

First line: what keeps ranks from running here (a script or data path that is not there, or cannot be read). Second
line: facts that should be the same on all nodes, and notes of what is short. Nothing that is slow to import is used:
this runs beside the start of ranks, at the lowest priority.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import resource
import stat
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path

from resilio_hpc.core import bounded, process_title
from resilio_hpc.core.errors import os_error_text
from resilio_hpc.launch.process import process_tree

SCRIPT_S = 2.0
DATA_S = 6.0
READ_BYTES = 1 << 16
MOST_SCRIPT_BYTES = 16 << 20
LITTLE_BYTES = {"/dev/shm": 64 << 20, "/tmp": 64 << 20}
LITTLE_RUN_BYTES = 1 << 30
LIMITS = {"open files": "NOFILE", "locked memory": "MEMLOCK", "processes": "NPROC", "stack": "STACK"}
PACKAGES = {
    "torch": r"torch-(?P<v>[^-]+)", "NCCL": r"nvidia_nccl_cu\d+-(?P<v>[^-]+)", "numpy": r"numpy-(?P<v>[^-]+)",
    "CUDA": r"nvidia_cuda_runtime_cu\d+-(?P<v>[^-]+)", "resilio": r"resilio_hpc-(?P<v>[^-]+)",
}  # fmt: skip


def missing(
    script: str, data_paths: list[str], data_s: float = DATA_S, read: Callable[[str], None] | None = None
) -> tuple[str, list[str]]:
    """Return what keeps ranks from running here, or "", and what did not answer in time."""
    read = read or read_some
    asked = {f"script {script}": bounded.begin(lambda: read(script))} if script else {}
    asked |= {f"--data-path {path}": bounded.begin(lambda path=path: read(path)) for path in data_paths}  # type: ignore[misc]
    wait(asked.values(), data_s if data_paths else SCRIPT_S)
    wrong, silent = [], []
    for name, future in asked.items():
        if not future.done():
            silent.append(f"{name} does not answer")
        elif isinstance(error := future.exception(), OSError):
            wrong.append(f"{name}: {error.strerror}")
    return "; ".join(wrong), silent


def read_some(path: str) -> None:
    """Read the beginning of a file, or the names of some entries of a directory. Raises OSError."""
    mode = os.stat(path).st_mode  # noqa: PTH116
    if stat.S_ISDIR(mode):
        with os.scandir(path) as entries:
            next(entries, None)
        if not os.access(path, os.X_OK):
            raise PermissionError(13, "its entries cannot be opened", path)
    elif stat.S_ISREG(mode):
        with open(path, "rb") as file:
            file.read(READ_BYTES)


def facts(script: str) -> dict[str, str]:
    """Return what should be the same on all nodes of a run."""
    found = {
        "kernel": platform.release(),
        "system": _first(r'PRETTY_NAME="?([^"\n]*)', "/etc/os-release"),
        "libc": os.confstr("CS_GNU_LIBC_VERSION") or "",
        "Python": f"{platform.python_version()} ({sys.executable})",
        "NVIDIA driver": _first(r"(?:Module|x86_64|aarch64)\s+([\d.]+)", "/proc/driver/nvidia/version"),
        "AMD driver": _text("/sys/module/amdgpu/version"),
        "InfiniBand driver": _text("/sys/module/mlx5_core/version"),
        "InfiniBand firmware": _joined("/sys/class/infiniband", "*/fw_ver"),
        "active InfiniBand ports": _active_ports(),
        "GPUs": _models(),
        "script": _hash(script),
        **{f"limit of {name}": _limit(limit) for name, limit in LIMITS.items()},
        **_packages(),
    }
    return {name: value[:120] for name, value in found.items() if value}


def short_of_room(run_dir: str) -> list[str]:
    """Return which file systems are nearly full."""
    found = []
    for path, least in {**LITTLE_BYTES, run_dir: LITTLE_RUN_BYTES}.items():
        try:
            room = bounded.in_time(lambda path=path: os.statvfs(path), SCRIPT_S)  # type: ignore[misc]
        except OSError as error:
            if path != run_dir:  # it may not be there yet
                found.append(os_error_text(error, path))
            continue
        free = room.f_bavail * room.f_frsize
        if room.f_blocks and free < least:
            found.append(f"{path} has {free >> 20} MiB free")
        if room.f_files and room.f_favail == 0:
            found.append(f"{path} can hold no more files")
    return found


def _hash(path: str) -> str:
    def digest() -> str:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read(MOST_SCRIPT_BYTES)).hexdigest()[:12]

    try:
        return bounded.in_time(digest, SCRIPT_S) if path else ""
    except OSError:
        return ""


def _packages() -> dict[str, str]:
    """Return versions of packages that matter, and one number for all that are installed, by their names alone."""
    names = sorted({name for folder in sys.path for name in _in_time(lambda folder=folder: _installed(folder))})  # type: ignore[misc]
    found = {"packages": hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]} if names else {}
    for package, pattern in PACKAGES.items():
        version = next((match["v"] for name in names if (match := re.match(pattern, name))), "")
        found[package] = version.removesuffix(".dist")
    return found


def _installed(folder: str) -> list[str]:
    try:
        return [name.removesuffix(".dist-info") for name in os.listdir(folder) if name.endswith(".dist-info")]  # noqa: PTH208
    except OSError:
        return []


def _in_time(call: Callable[[], list[str]]) -> list[str]:
    try:
        return bounded.in_time(call, SCRIPT_S)
    except OSError:
        return []


def _limit(name: str) -> str:
    soft, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
    return "none" if soft == resource.RLIM_INFINITY else str(soft)


def _models() -> str:
    models = re.findall(r"Model:\s*(.+)", "".join(_texts("/proc/driver/nvidia/gpus", "*/information")))
    return ", ".join(f"{models.count(model)} {model.strip()}" for model in sorted(set(models)))


def _active_ports() -> str:
    states = list(_texts("/sys/class/infiniband", "*/ports/*/state"))
    return f"{sum('ACTIVE' in state for state in states)} of {len(states)}" if states else ""


def _joined(folder: str, pattern: str) -> str:
    return ", ".join(sorted({text.strip() for text in _texts(folder, pattern)}))


def _texts(folder: str, pattern: str) -> Iterator[str]:
    return (_text(str(path)) for path in sorted(Path(folder).glob(pattern)))


def _first(pattern: str, path: str) -> str:
    found = re.search(pattern, _text(path))
    return found[1] if found else ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def main() -> None:
    """Print two lines of JSON."""
    process_title.show("environment")
    process_tree.die_with_parent(os.getppid())
    asked = json.loads(sys.argv[1])
    unfit, notes = missing(asked["script"], asked["data_paths"])
    print(json.dumps({"unfit": unfit}), flush=True)
    os.nice(19)
    notes += short_of_room(asked["run_dir"])
    print(json.dumps({"unfit": unfit, "facts": facts(asked["script"]), "notes": notes[:8]}), flush=True)
    os._exit(0)  # a thread may hang in a file system


if __name__ == "__main__":
    main()
