"""The protocol of a Slurm client: what can be asked and ordered, by whichever means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from resilio_hpc.slurm.client.model import Job, Node, Partition
from resilio_hpc.slurm.client.order_writer import OrderWriter


class SlurmClient(Protocol):
    """Every call ends within its time limit.

    It raises Unanswered when slurmctld did not answer (then the answer is unknown, and so is whether an order was
    carried out), SlurmError when Slurm refused, UsageError for what can never be right. A node or job that is not in an
    answer is not known to Slurm; a state that is not understood is UNKNOWN. Neither is a failure.
    """

    @property
    def orders(self) -> OrderWriter:
        """Return the writer of orders to Slurm."""

    def nodes(self, names: Sequence[str] = ()) -> tuple[Node, ...]:
        """Return all nodes, or those of these names that Slurm knows."""

    def partitions(self) -> tuple[Partition, ...]:
        """Return all partitions."""

    def jobs(self, numbers: Sequence[str] = ()) -> tuple[Job, ...]:
        """Return all jobs that slurmctld remembers, or those of these numbers; all records of a job array."""

    def node_updates(self) -> int | None:
        """Return how many orders to nodes slurmctld has carried out, of all users; None when it does not tell."""
