"""The processes of a machine or of a cluster, read from /proc."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.devtools.devcluster.spec import ClusterPaths

_KILL_TIMEOUT_S = 10.0
_LOOKS = 10
_inits: dict[int, int] = {}  # PID namespace → its init, as last found


@dataclass(frozen=True)
class NodeProcess:
    """A process on a machine: its pid there, its pid on the host (for signals), its command line."""

    pid: int
    host_pid: int
    argv: tuple[str, ...]

    @property
    def program(self) -> str:
        return Path(self.argv[0]).name if self.argv else ""


def processes_of(pid_namespace: int) -> list[NodeProcess]:
    """Return every process in a machine's PID namespace, by pid; none without one (0: powered off).

    A daemon that forks and ends during a look can be missed in both its shapes, so the look is repeated until nothing
    changes.
    """
    before: list[NodeProcess] | None = None
    for _ in range(_LOOKS):
        found = _look(pid_namespace) if pid_namespace else []
        if found == before:
            break
        before = found
    return found


def init_of(pid_namespace: int) -> int | None:
    """Return the host's pid of a machine's init; None for a machine that is off. It lives as long as its namespace."""
    known = _inits.get(pid_namespace)
    if known is None or _namespace_of(known) != pid_namespace:
        known = next((process.host_pid for process in processes_of(pid_namespace) if process.pid == 1), None)
        if known is not None:
            _inits[pid_namespace] = known
    return known


def _namespace_of(pid: int | str) -> int:
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino  # noqa: PTH116 (a Path for each process costs more than the look)
    except OSError:
        return 0  # it has ended


def _look(pid_namespace: int) -> list[NodeProcess]:
    found: list[NodeProcess] = []
    for name in os.listdir("/proc"):  # noqa: PTH208 (as above)
        if not name.isdigit() or _namespace_of(name) != pid_namespace:
            continue
        try:
            status = Path("/proc", name, "status").read_text()
            argv = tuple(
                a.decode(errors="replace") for a in Path("/proc", name, "cmdline").read_bytes().split(b"\0")[:-1]
            )
        except OSError:
            continue  # it ended meanwhile
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        if not fields["State"].startswith(("Z", "X")):
            found.append(NodeProcess(int(fields["NSpid"].split()[-1]), int(name), argv))
    return sorted(found, key=lambda process: process.pid)


def wait_until_stopped(pid: int, timeout_s: float = 5.0) -> None:
    """Wait after SIGSTOP: each thread still finishes what it is doing. Raises SlurmError."""
    deadline = time.monotonic() + timeout_s
    while any(state not in "TtZX" for state in _thread_states(pid)):
        if time.monotonic() > deadline:
            raise SlurmError(f"process {pid} does not stop within {timeout_s:g} s of SIGSTOP")
        time.sleep(0.005)


def _thread_states(pid: int) -> Iterator[str]:
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            yield task.read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue  # it ended meanwhile


def rootless_processes(where: ClusterPaths) -> list[int]:
    """Return pids on this host with a rootless cluster's SLURM_CONF: its daemons, steps and their tasks."""
    marker = b"SLURM_CONF=" + os.fsencode(where.etc / "slurm.conf")
    return [pid for pid, environment in _environments() if marker in environment.split(b"\0")]


def _environments() -> Iterator[tuple[int, bytes]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                yield int(entry.name), (entry / "environ").read_bytes()
            except OSError:
                continue  # it is another user's, or ended meanwhile


def kill_rootless(where: ClusterPaths) -> None:
    """Kill everything of a rootless cluster, including what is started meanwhile."""
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while pids := rootless_processes(where):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if time.monotonic() > deadline:
            raise SlurmError(f"processes of {where.state.name} do not die: {pids}")
        time.sleep(0.01)
