"""Processes that outlived a launch which was killed as a whole: known by the token in their environment.

The caller makes sure that no agent with the same token can start meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec import Struct

from resilio_hpc.launch.process import process_tree, shared_memory
from resilio_hpc.launch.process.process_tree import PROC, TOKEN_VARIABLE

_BORN = 19  # index in ``process_tree.stat``
_PASSES = 5
_END_S = 0.5


class LostProcess(Struct, frozen=True):
    """A process of this user. ``born``: Unix seconds; ``name``: the kernel's."""

    pid: int
    token: str
    born: float
    name: str


def lost(of_token: Callable[[str], bool], proc: Path = PROC) -> list[LostProcess]:
    """Return this user's processes with such a token, without trackers, this process, and its ancestors."""
    found = []
    for pid in process_tree.strangers(proc):
        token, born = _token(pid, proc), _born(pid, proc)
        if token and born and of_token(token) and _is_own(pid, proc) and not process_tree.is_tracker(pid, proc):
            found.append(LostProcess(pid, token, born, _name(pid, proc)))
    return found


def end(of_token: Callable[[str], bool], born_before: float) -> tuple[list[LostProcess], list[Path]]:
    """Kill those that were born before a moment, and their descendants. Return them, and segments that they left."""
    ended: dict[int, LostProcess] = {}
    segments: set[Path] = set()
    for _ in range(_PASSES):
        found = {one.pid: one for one in lost(of_token)}
        old = {pid for pid, one in found.items() if one.born <= born_before}
        old |= {pid for root in (*old, *ended) for pid in process_tree.descendants(root) if pid in found}
        if not old:
            break
        segments |= shared_memory.held(old, min(found[pid].born for pid in old) - 1.0)
        for pid in old:
            if process_tree.kill_if(pid, partial(_is_still, found[pid])):
                ended[pid] = found[pid]
        process_tree.wait_for_ends(old, _END_S)
    return list(ended.values()), shared_memory.remove(segments) if segments else []


def _is_still(process: LostProcess) -> bool:
    return _token(process.pid, PROC) == process.token


def _token(pid: int, proc: Path) -> str:
    start = f"{TOKEN_VARIABLE}=".encode()
    with contextlib.suppress(OSError), open(f"{proc}/{pid}/environ", "rb") as file:
        for word in file.read().split(b"\0"):
            if word.startswith(start):
                return word[len(start) :].decode(errors="replace")
    return ""


def _born(pid: int, proc: Path) -> float:
    fields = process_tree.stat(pid, proc)
    try:
        since_boot = int(fields[_BORN]) / os.sysconf("SC_CLK_TCK")
    except (IndexError, ValueError):
        return 0.0
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot


def _is_own(pid: int, proc: Path) -> bool:
    try:
        return Path(f"{proc}/{pid}").stat().st_uid == os.geteuid()
    except OSError:
        return False


def _name(pid: int, proc: Path) -> str:
    try:
        return Path(f"{proc}/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "?"
