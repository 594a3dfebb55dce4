"""The host's files that this Python, its virtual environment and this project need on a machine."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import resilio_hpc
from resilio_hpc.core.process import run

_RESOLVED = re.compile(r"^\s*(\S+) => (/\S+)", re.MULTILINE)
_WITHOUT = ("_tkinter",)  # it needs all of X11, and no rank needs it


@dataclass(frozen=True)
class HostPython:
    """Host paths to show at the same place: directories, and the shared libraries that the image lacks."""

    paths: tuple[str, ...]
    libraries: tuple[str, ...] = ()


def host_python(root: str) -> HostPython:
    """Return the running interpreter's paths for a machine whose image is ``root`` ("/" is the host's own)."""
    base = Path(sys.base_prefix).resolve()
    project = Path(resilio_hpc.__file__).parent.parent
    if root == "/":
        return HostPython(_outermost([base, Path(sys.prefix), project]))
    interpreter = Path(sys.executable).resolve()
    wanted = [base, Path(sys.prefix), project]
    if base == Path("/usr"):  # the image's own /usr must not be hidden, so only Python's part is shown
        stdlib = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
        wanted = [*_links(Path(sys.executable)), interpreter, *stdlib, Path(sys.prefix), project]
    extensions = [path for path in _extensions() if not path.name.startswith(_WITHOUT)]
    return HostPython(_outermost(wanted), missing_libraries(_needed([interpreter, *extensions]), Path(root)))


def _links(program: Path) -> list[Path]:
    """Return the links on the way from ``program`` to the file behind it.

    A virtual environment names /usr/bin/python3.
    """
    found = []
    while program.is_symlink():
        found.append(program)
        program = Path(os.path.normpath(program.parent / program.readlink()))
    return found


def _outermost(paths: Iterable[Path]) -> tuple[str, ...]:
    kept: list[Path] = []
    for path in sorted(set(paths) - {Path("/usr")}, key=lambda path: len(path.parts)):
        if not any(path.is_relative_to(other) for other in kept):
            kept.append(path)
    return tuple(str(path) for path in kept)


def _extensions() -> list[Path]:
    directory = sysconfig.get_config_var("DESTSHARED")
    return sorted(Path(directory).glob("*.so")) if directory else []


def _needed(files: Iterable[Path]) -> dict[str, str]:
    """Return the shared libraries (name → path on the host) that these programs and extensions load."""
    listed = run(["ldd", *map(str, files)], 60.0, check=False).stdout
    return dict(_RESOLVED.findall(listed))


def missing_libraries(needed: Mapping[str, str], root: Path) -> tuple[str, ...]:
    """Return host paths of libraries that the image lacks; those that it has under the name are newer, and fit."""
    system = ("/lib/", "/usr/lib/")  # any other path belongs to the interpreter and is shown with it
    return tuple(
        path
        for path in sorted(set(needed.values()))
        if path.startswith(system) and not (root / path.lstrip("/")).exists()
    )
