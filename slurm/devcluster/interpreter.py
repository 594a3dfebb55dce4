"""What a machine must show of the host so that this Python, its virtual environment and this project run there."""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import resilio_hpc


@dataclass(frozen=True)
class HostPython:
    """Host paths to show at the same place."""

    paths: tuple[str, ...]


def host_python(root: str) -> HostPython:
    """The running interpreter's paths for a machine whose image is ``root``."""
    project = Path(resilio_hpc.__file__).parent.parent
    wanted = [Path(sys.base_prefix).resolve(), Path(sys.prefix), project]
    if Path(sys.base_prefix).resolve() == Path("/usr"):  # never hide the image's own /usr: only what belongs to Python
        stdlib = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
        wanted = [Path(sys.executable).resolve(), *stdlib, Path(sys.prefix), project] if root != "/" else [project]
    kept: list[Path] = []
    for path in sorted(dict.fromkeys(p for p in wanted if p != Path("/usr")), key=lambda p: len(p.parts)):
        if not any(path.is_relative_to(other) for other in kept):
            kept.append(path)
    return HostPython(tuple(str(path) for path in kept))
