"""Orders to Slurm by its command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from resilio_hpc.core.errors import CommandError
from resilio_hpc.slurm.client import orders
from resilio_hpc.slurm.client.commands import TIMEOUT_S
from resilio_hpc.slurm.client.runner import Runner, run_here
from resilio_hpc.slurm.client.slurm_errors import refused


class OrderWriter:
    """Changes nodes and jobs; every client writes in this way. Raises the errors of ``SlurmClient``."""

    def __init__(self, run: Runner = run_here, timeout_s: float = TIMEOUT_S) -> None:
        self._run = run
        self._timeout_s = timeout_s

    def drain(self, nodes: Sequence[str], reason: str) -> None:
        """Let no new job start on the nodes. It replaces any reason there: see ``drain.writer`` for the rules."""
        self._order(orders.drain(nodes, reason))

    def reword(self, nodes: Sequence[str], reason: str) -> None:
        """Give drained nodes another reason."""
        self._order(orders.reword(nodes, reason))

    def undrain(self, nodes: Sequence[str]) -> None:
        """End a drain; a node that is DOWN stays DOWN."""
        self._order(orders.undrain(nodes))

    def set_weight(self, nodes: Sequence[str], weight: int) -> None:
        """Set the nodes' weight: Slurm fills nodes of a low weight first."""
        self._order(orders.weight(nodes, weight))

    def update_job(self, job: str, changes: Mapping[str, str]) -> None:
        """Run ``scontrol update JobId=…`` with scontrol's names: ``{"NumNodes": "4"}``."""
        self._order(orders.update_job(job, changes))

    def _order(self, argv: Sequence[str]) -> None:
        try:
            self._run(argv, self._timeout_s, {})
        except CommandError as error:
            raise refused(error) from error
