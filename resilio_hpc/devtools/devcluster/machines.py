"""What every kind of dev cluster has: machines on which commands run, and slurmctld on one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from resilio_hpc.devtools.devcluster.messages import MachineState


class ClusterMachines(Protocol):
    """``rack_machines``: in namespaces of their own; ``host_machines``: all are this host."""

    def command(self, machine: str, argv: Sequence[str], *, user: str = "root", cwd: str = "") -> list[str]:
        """Return the host command that runs ``argv`` on a machine (``cwd`` defaults to the shared directory)."""

    def environment(self, extra: Mapping[str, str] | None = None, user: str = "root") -> dict[str, str]:
        """Environment of a command on a machine: a login's, and nothing of the host's."""

    def states(self) -> dict[str, MachineState]:
        """Power and network state of every machine."""

    def kill_slurmctld(self) -> None:
        """SIGKILL slurmctld; running jobs go on, commands fail."""

    def start_slurmctld(self) -> None:
        """Start slurmctld again on its saved state."""
