"""What ps, pgrep and top show for a process: ``resilio saver n1 run 0dbbcdbf63de``, ``resilio rank 3 n1: python …``.

A title is written over the process's own arguments (proc(5): arg_start, arg_end). It is cut where they end, so the
environment behind them stays as it is. It holds names and what the user's own command line holds, and nothing else.

It imports nothing of this package: ranks load it by its file's path where the package is not installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

OWNER_VARIABLE = "RESILIO_PROCESS_OF"
"""In the environment of an agent's or launcher's helper processes: ``RUN:NODE``."""
AGENT_MODULE = "resilio_hpc.launch.agent.agent"
_SHORT = {
    "io_worker": "io", "disk_server": "disk", "read_ahead": "reader", "replicator": "copies", "local_saver": "saver",
    "device_evidence": "gpus", "sender": "notify", "mpi_task": "mpi",
}  # fmt: skip
_FIND_ARGUMENTS = ("setproctitle", "prctl")  # modules that set titles, and look for the arguments in memory
_PR_SET_NAME = 15
_libc = ctypes.CDLL(None)  # loaded here, so that a forked child needs no dlopen
_first = b""  # the arguments as the kernel gave them, before the first title


def show(role: str, owner: str | None = None, *more: str) -> None:
    """Name a process of this package. ``owner``: ``RUN:NODE``, by default that of the environment."""
    run_id, _, node = (os.environ.get(OWNER_VARIABLE, "") if owner is None else owner).partition(":")
    set_name(f"resilio-{_SHORT.get(role, role)}")
    set_title(["resilio", role, *([node] if node else []), *(["run", run_id] if run_id else []), *more])


def show_rank(kind: str, argv: Sequence[str], token: str) -> None:
    """Name a rank that runs ``argv``, a script's path or a module's name with arguments. ``token``: ``RUN:NODE``."""
    rank, node = os.environ.get("RANK", ""), token.partition(":")[2]
    place = " ".join(word for word in ("rank", rank, node) if word)
    set_name(f"python r{rank}" if rank else "python")
    words = ["resilio", f"{place}:", "python", "-u", *(["-m"] if kind == "module" else []), *argv]
    if any(name in sys.modules for name in _FIND_ARGUMENTS):
        _set_between(words)
    else:
        set_title(words)
        sys.meta_path.insert(0, _GivesWay(words))


def helper_in(line: bytes) -> str:
    """Return the role in a command line of /proc/PID/cmdline; "" for other processes, ranks among them. Pure."""
    words = line.split(b"\0")
    if len(words) < 2 or words[0] != b"resilio" or b" " in words[1]:
        return ""
    return words[1].decode(errors="replace")


def is_agent(argv: Sequence[str]) -> bool:
    """Return whether the arguments are an agent's, also before it has its title. Pure."""
    if tuple(argv[:2]) == ("resilio", "agent"):
        return True
    return AGENT_MODULE in argv and os.path.basename(argv[0]).startswith("python")  # noqa: PTH119


def set_name(name: str) -> None:
    """Set the name that top and pgrep show, of this thread and of those that it starts (15 bytes)."""
    _libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]), 0, 0, 0)


def set_title(words: Sequence[str]) -> None:
    """Write these words over this process's arguments; what does not fit is cut. Raises nothing."""
    text = b"".join(os.fsencode(word).replace(b"\0", b" ") + b"\0" for word in words)
    _overwrite(lambda size: text[: size - 1].ljust(size, b"\0"))


def _set_between(words: Sequence[str]) -> None:
    """Do as ``set_title``, and keep number and first of the arguments: some modules walk to them from their end."""

    def line(size: int) -> bytes:
        first, count = _first.partition(b"\0")[0], _first.count(b"\0")
        room = size - len(first) - 1 - max(count - 1, 1)
        if count < 2 or room <= 0:
            return _first
        title = b" ".join(os.fsencode(word).replace(b"\0", b" ") for word in words)[:room].ljust(room)
        return first + b"\0" + title + b"\0" * (count - 1)

    _overwrite(line)


def _overwrite(line: Callable[[int], bytes]) -> None:
    global _first
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # fields 48 and 49; the state, field 3, is the first here
        if 0 < start < end:
            _first = _first or ctypes.string_at(start, end - start)
            ctypes.memmove(start, line(end - start), end - start)


class _GivesWay:
    """Finds no module; before one that sets titles is imported, it lets that one find the arguments."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return None: the other finders find it."""
        if name in _FIND_ARGUMENTS:
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(self)
            _set_between(self._words)
        return None
