"""What can be asked of Slurm and told to it, by whichever means: the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from resilio_hpc.slurm.client.model import Job, Node, Partition
from resilio_hpc.slurm.client.order_writer import OrderWriter


class SlurmClient(Protocol):
    """Every call ends within its time limit.

    It raises Unanswered when slurmctld did not answer (what was asked is then not known, and whether an order was
    carried out neither), SlurmError when Slurm refused, UsageError for what can never be right. A node or job that is
    not in an answer is not known to Slurm; a state that is not understood is UNKNOWN. Neither is a failure.
    """

    @property
    def orders(self) -> OrderWriter:
        """Return what gives orders to Slurm."""

    def nodes(self, names: Sequence[str] = ()) -> tuple[Node, ...]:
        """All nodes, or those of these names that Slurm knows."""

    def partitions(self) -> tuple[Partition, ...]:
        """Return all partitions."""

    def jobs(self, numbers: Sequence[str] = ()) -> tuple[Job, ...]:
        """All jobs that slurmctld remembers, or those of these numbers; all records of a job array."""

    def node_updates(self) -> int | None:
        """How many orders to nodes slurmctld has carried out, of all users; None when it does not tell."""
