"""The Pythons of this machine, their virtual environments, and running commands there, for ``wheels.py``."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / ".setup" / "wheels"


@dataclass(frozen=True)
class Interpreter:
    """A Python of this machine, with headers: its program and version."""

    program: Path
    version: tuple[int, int]

    @property
    def name(self) -> str:
        """Return "3.11"."""
        return ".".join(map(str, self.version))


def say(text: str) -> None:
    """Print a line."""
    print(f"wheels: {text}", flush=True)


def run(argv: Sequence[str | Path], cwd: Path = ROOT, extra: dict[str, str] | None = None) -> str:
    """Run a command; return its output. Ends the program, with the end of the output, if it fails."""
    words = list(map(str, argv))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_CONFIG", "PYTHON"))}
    done = subprocess.run(
        words,
        cwd=cwd,
        env=environment | (extra or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"{done.stdout[-4000:]}\nwheels: failed ({done.returncode}): {' '.join(words)}")
    return done.stdout


def interpreters() -> Iterator[Interpreter]:
    """Yield one Python of each version from 3.10 on that has headers and the module venv."""
    program = (
        "import sys, sysconfig, pathlib, venv; assert pathlib.Path(sysconfig.get_path('include'), 'Python.h').exists();"
        "print(*sys.version_info[:2])"
    )
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in range(10, 20):
        on_path = [Path(found)] if (found := shutil.which(f"python3.{minor}")) else []
        for candidate in [*on_path, *sorted(pyenv.glob(f"3.{minor}.*/bin/python"))]:
            with contextlib.suppress(OSError, ValueError):
                tried = subprocess.run(
                    [candidate, "-c", program], capture_output=True, text=True, timeout=60, check=False
                )
                if [int(word) for word in tried.stdout.split()] == [3, minor]:
                    yield Interpreter(candidate, (3, minor))
                    break


def environment(python: Interpreter, name: str, packages: Sequence[str], is_kept: bool = False) -> Path:
    """Return the folder of programs of a virtual environment with these packages."""
    folder = WORK / name
    stamp = folder / "stamp"
    wanted = f"{python.program} {' '.join(packages)}"
    if not is_kept or not stamp.exists() or stamp.read_text() != wanted:
        run([python.program, "-m", "venv", "--clear", folder])
        run([folder / "bin" / "pip", "install", "--quiet", *packages])
        stamp.write_text(wanted)
    return folder / "bin"
