"""Which launch holds a run directory, and whether that launch still runs. A dead one never blocks a restart.

On one machine the kernel tells: a process is its pid and its start time, since pids are reused. From another machine,
or another container, only its pulse tells: a file that its helper process rewrites every second. The reader counts by
its own clock, so no clocks are compared. A pulse that stands still for long enough means that the launch is dead.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from resilio_hpc.core.durable import write_atomic
from resilio_hpc.launch.process import process_tree

BEAT_S = 1.0
LEASE_S = 30.0
POLL_S = 0.5
QUIET_S = 3.0  # time before a line tells the user why the launch waits
PROC = process_tree.PROC
_STATE, _STARTED = 0, 19  # indices in ``process_tree.stat``


class Holder(Struct, frozen=True):
    """The process of a launch.

    ``kernel``: the boot and the process namespace in which ``pid`` counts; ``born``: its start time, in the kernel's
    ticks; ``within``: the part of a Slurm job in which it was started, or "".
    """

    host: str = ""
    pid: int = 0
    kernel: str = ""
    born: int = 0
    within: str = ""


def this_process(environment: Mapping[str, str]) -> Holder:
    """Return the holder for the calling process."""
    pid = os.getpid()
    return Holder(socket.gethostname(), pid, kernel_here(), born(pid) or 0, slurm_part(environment))


def slurm_part(environment: Mapping[str, str]) -> str:
    """Return ``12``, or ``12r1`` when Slurm has requeued the job; "" outside of Slurm. Pure."""
    job, restarts = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_RESTART_COUNT", "0")
    return f"{job}r{restarts}" if job and restarts not in ("", "0") else job


def kernel_here(proc: Path = PROC) -> str:
    """Return a name of this boot and process namespace; "" where the kernel does not tell it."""
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{(proc / 'self/ns/pid').readlink()}"
    except OSError:
        return ""


def born(pid: int, proc: Path = PROC) -> int | None:
    """Return a process's start time, in ticks since the boot; None where no process has that pid."""
    fields = process_tree.stat(pid, proc)
    try:
        return None if fields[_STATE] in (b"Z", b"X") else int(fields[_STARTED])
    except (IndexError, ValueError):
        return None


def lives(holder: Holder, kernel: str, born_of: Callable[[int], int | None] = born) -> bool | None:
    """Return whether the process runs; None where that is not known here. ``kernel``: ``kernel_here()``."""
    if not holder.kernel or holder.kernel != kernel:
        return None
    return holder.born == born_of(holder.pid)


def pulse_file(run_path: Path, turn: int) -> Path:
    """Return the file of the pulse of the launch that has a turn."""
    return run_path / "links" / f"turn.{turn}.pulse"


class Pulse:
    """The pulse, written by a helper process of the launch's supervisor, which dies with it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._count = 0
        self._due = float("-inf")

    def tick(self, now: float) -> None:
        """Rewrite the pulse when it is due. Raises OSError."""
        if now >= self._due:
            self._due = now + BEAT_S
            self._count += 1
            write_atomic(self._file, b"%d\n" % self._count, durable=False)

    def end(self) -> None:
        """Remove the pulse at the end of the launch."""
        self._file.unlink(missing_ok=True)


def watch(
    signs: Callable[[], object],
    lease_s: float = LEASE_S,
    say: Callable[[float], None] = lambda _lease_s: None,
    poll_s: float = POLL_S,
) -> bool:
    """Return whether ``signs`` change within ``lease_s``, so that the launch behind them runs.

    ``say`` is called once, when the answer takes long.
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
