"""Which launch has a run directory, and whether that launch still lives. A dead one never blocks a restart.

On one machine the kernel tells: a process is its number and the moment of its start, since numbers are used again. From
another machine, or another container, only its pulse tells: a file that its helper process rewrites every second. The
reader counts by its own clock, so no clocks are compared. A pulse that stands still for ``LEASE_S`` belongs to a launch
that is dead, or that its file system has left: its commits are refused as soon as a later epoch is taken.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.core.durable import write_atomic
from resilio_hpc.launch.process import process_tree

BEAT_S = 1.0
LEASE_S = 30.0
POLL_S = 0.5
QUIET_S = 3.0  # how long a look may take before the user hears of it
PROC = process_tree.PROC
_STATE, _STARTED = 0, 19  # of ``process_tree.stat``


@dataclass(frozen=True)
class Holder:
    """A launch's process.

    ``kernel``: the boot and the process namespace in which ``pid`` counts; ``born``: when it began, in the kernel's
    ticks; ``within``: the part of a Slurm job in which it was started, or "".
    """

    host: str = ""
    pid: int = 0
    kernel: str = ""
    born: int = 0
    within: str = ""


def this_process(environment: Mapping[str, str]) -> Holder:
    """Return the launch that calls."""
    pid = os.getpid()
    return Holder(socket.gethostname(), pid, kernel_here(), born(pid) or 0, slurm_part(environment))


def slurm_part(environment: Mapping[str, str]) -> str:
    """``12``, or ``12r1`` when Slurm has requeued the job; "" outside of Slurm. Pure."""
    job, restarts = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_RESTART_COUNT", "0")
    return f"{job}r{restarts}" if job and restarts not in ("", "0") else job


def kernel_here(proc: Path = PROC) -> str:
    """Names this boot of this machine, and the processes that can be seen; "" where the kernel does not tell."""
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{(proc / 'self/ns/pid').readlink()}"
    except OSError:
        return ""


def born(pid: int, proc: Path = PROC) -> int | None:
    """When a process began, in ticks since the boot; None where none of that number lives."""
    fields = process_tree.stat(pid, proc)
    try:
        return None if fields[_STATE] in (b"Z", b"X") else int(fields[_STARTED])
    except (IndexError, ValueError):
        return None


def lives(holder: Holder, kernel: str, born_of: Callable[[int], int | None] = born) -> bool | None:
    """Whether the process lives; None where that cannot be told from here. ``kernel``: ``kernel_here()``."""
    if not holder.kernel or holder.kernel != kernel:
        return None
    return holder.born == born_of(holder.pid)


def pulse_file(run_path: Path, turn: int) -> Path:
    """Where the launch that has a turn shows that it lives."""
    return run_path / "links" / f"turn.{turn}.pulse"


class Pulse:
    """Written by the helper process of the launch's supervisor, which dies with it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._count = 0
        self._due = float("-inf")

    def tick(self, now: float) -> None:
        """Beat when it is time. Raises OSError."""
        if now >= self._due:
            self._due = now + BEAT_S
            self._count += 1
            write_atomic(self._file, b"%d\n" % self._count, durable=False)

    def end(self) -> None:
        """End with the launch."""
        self._file.unlink(missing_ok=True)


def watch(
    signs: Callable[[], object],
    lease_s: float = LEASE_S,
    say: Callable[[float], None] = lambda _lease_s: None,
    poll_s: float = POLL_S,
) -> bool:
    """Whether ``signs`` change within ``lease_s``: then the launch that makes them lives.

    ``say`` is called once, when the answer takes its time.
    """
    clock = time.monotonic
    began, first, said = clock(), signs(), False
    while clock() - began < lease_s:
        time.sleep(min(poll_s, lease_s))
        if signs() != first:
            return True
        if not said and clock() - began > QUIET_S:
            said = True
            say(lease_s)
    return False
