"""The Python side of ``io_shim.c``: build it, arm it in this process, read its log."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.support.environments import scrubbed

T = TypeVar("T")
Harmed = Callable[..., Any]
"""The fixture of that name: run a script of this folder under the shim, and give what it prints."""
EVERY = int(os.environ.get("SHIM_EVERY", "1"))
"""Of so many calls only one is tried, counted from the last."""
MODES = ("off", "record", "kill", "tear", "fail once", "fail on", "hang", "orphan")


@dataclass(frozen=True)
class Harm:
    """What is to happen at I/O call number ``at``. ``error``: an errno, for the failing modes."""

    mode: str = "record"
    at: int = 0
    error: int = 0
    log: Path | None = None
    release: Path | None = None


@dataclass(frozen=True)
class Call:
    """A line of the log. ``more``: the second path, or offset and size."""

    number: int
    name: str
    path: Path
    more: tuple[str, ...]


def build(directory: Path) -> Path:
    """Compile the shim with the compiler that Python's own extensions are built with."""
    library = directory / "io_shim.so"
    compiler = (sysconfig.get_config_var("CC") or "cc").split()
    argv = [*compiler, "-shared", "-fPIC", "-O1", str(Path(__file__).with_name("io_shim.c")), "-o", str(library)]
    subprocess.run(argv, check=True)
    return library


def plain_environment() -> dict[str, str]:
    """Of a process that is alone, without a launcher, and starts no threads that a fork would lose."""
    return scrubbed(OPENBLAS_NUM_THREADS="1")


def arm(harm: Harm, *directories: Path) -> int:
    """From now on, in this process and its children; programs started since then share its count. The number of calls
    counted before."""
    library: Any = ctypes.CDLL(None)
    library.shim_arm.restype = ctypes.c_long
    shared = Path(os.environ["SHIM_STATES"]) / str(os.getpid())
    if os.environ.get("SHIM_STATE") != str(shared):
        os.environ["SHIM_STATE"] = str(shared)
        library.shim_share(os.fsencode(shared))
    places = [os.fsencode(path or "") for path in (harm.log, harm.release)]
    below = b":".join(os.fsencode(directory) for directory in directories)
    mode, at = MODES.index(harm.mode), ctypes.c_long(harm.at)
    return int(library.shim_arm(mode, at, harm.error, below, *places))


def tried(recorded: Iterable[T]) -> list[T]:
    """One of every EVERY, the last first."""
    return list(recorded)[::-EVERY]


def read_log(path: Path) -> Sequence[Call]:
    """Every call that was counted, in the order in which they were begun, by whichever process."""
    calls = []
    for line in path.read_text().splitlines():
        number, name, where, *more = line.split("\t")
        calls.append(Call(int(number), name, Path(where), tuple(text for text in more if text)))
    return calls
