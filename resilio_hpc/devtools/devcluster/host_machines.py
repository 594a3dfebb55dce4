"""The machines of a cluster without root and without namespaces: several slurmd on this host (``slurmd -N``).

It is a real Slurm, but every "machine" is this host: no power cuts, no network partitions, no private /tmp or NVMe,
jobs run as the calling user. Its processes are known by their SLURM_CONF; ``down`` kills every process that has it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from resilio_hpc.core.errors import CommandError, SlurmError, UsageError
from resilio_hpc.core.process import run
from resilio_hpc.devtools.devcluster import processes, services
from resilio_hpc.devtools.devcluster.messages import MachineState
from resilio_hpc.devtools.devcluster.spec import CONTROLLER, ClusterPaths, ClusterSpec

_START_TIMEOUT_S = 20.0


class HostMachines:
    """``ClusterMachines``, each of which is this host."""

    def __init__(self, spec: ClusterSpec, where: ClusterPaths) -> None:
        self._spec = spec
        self._layout = where

    def command(self, machine: str, argv: Sequence[str], *, user: str = "root", cwd: str = "") -> list[str]:
        """Return the host command that runs ``argv``; every machine is this host, and every user the calling one."""
        if machine not in self._spec.machines:
            raise UsageError(f"no machine {machine!r}; there are {', '.join(self._spec.machines)}")
        return ["env", f"--chdir={cwd or self._layout.shared}", *argv]

    def environment(self, extra: Mapping[str, str] | None = None, user: str = "root") -> dict[str, str]:
        """Return a login's environment with this cluster's SLURM_CONF."""
        own = {"SLURM_CONF": str(self._layout.etc / "slurm.conf"), "HOME": str(Path.home())}
        return {**services.ENVIRONMENT, "PATH": services.own_path(), **own, **(extra or {})}

    def states(self) -> dict[str, MachineState]:
        """Return every machine, which is this host."""
        return {
            name: MachineState(
                name=name,
                state="up",
                detail="(rootless: this host)",
                boots=1,
                link_up=True,
                address="127.0.0.1",
                pid_namespace=0,
            )
            for name in self._spec.machines
        }

    def kill_slurmctld(self) -> None:
        """Send SIGKILL to slurmctld."""
        os.kill(int((self._layout.state / "slurmctld.pid").read_text()), 9)

    def start_slurmctld(self) -> None:
        """Start slurmctld again on its saved state."""
        self._daemon(["slurmctld"], CONTROLLER)

    def start_daemons(self) -> None:
        """Start munged, slurmctld and each node's slurmd; raises SlurmError."""
        state = self._layout.state
        places = {
            "key-file": self._layout.munge_key,
            "socket": state / "munge.socket",
            "pid-file": state / "munged.pid",
            "seed-file": state / "munge.seed",
            "log-file": self._layout.log(CONTROLLER) / "munged.log",
        }
        options = [f"--{option}={path}" for option, path in places.items()]
        self._daemon(["munged", "--force", *options], CONTROLLER)
        self.start_slurmctld()
        for node in self._spec.compute_nodes:
            self._daemon(["slurmd", "-N", node], node)

    def _daemon(self, argv: Sequence[str], machine: str) -> None:
        # the daemon keeps its output open: it must not hold this process's pipes
        log = self._layout.log(machine) / "console.log"
        start = ["sh", "-c", f'exec "$@" </dev/null >>"{log}" 2>&1', "sh", *argv]
        try:
            run(start, _START_TIMEOUT_S, env=self.environment(), cwd=self._layout.state)
        except CommandError as error:
            raise SlurmError(f"{argv[0]} did not start ({error}); see {log.parent}") from None


def is_up(where: ClusterPaths) -> bool:
    """Return whether a rootless cluster runs there whose start was finished."""
    return where.control.is_file() and bool(processes.rootless_processes(where))


def free_ports(count: int) -> list[int]:
    """Return ports of this host that are free now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
