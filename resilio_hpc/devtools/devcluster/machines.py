"""The interface of every kind of dev cluster: machines on which commands run, and slurmctld on one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from resilio_hpc.devtools.devcluster.messages import MachineState


class ClusterMachines(Protocol):
    """``rack_machines``: in their own namespaces; ``host_machines``: all are this host."""

    def command(self, machine: str, argv: Sequence[str], *, user: str = "root", cwd: str = "") -> list[str]:
        """Return the host command that runs ``argv`` on a machine (``cwd`` defaults to the shared directory)."""

    def environment(self, extra: Mapping[str, str] | None = None, user: str = "root") -> dict[str, str]:
        """Return the environment of a command on a machine: a login's, with the caller's commands on its PATH."""

    def states(self) -> dict[str, MachineState]:
        """Return power and network state of every machine."""

    def kill_slurmctld(self) -> None:
        """Send SIGKILL to slurmctld; running jobs go on, commands fail."""

    def start_slurmctld(self) -> None:
        """Start slurmctld again on its saved state."""
