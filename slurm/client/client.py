"""What can be asked of Slurm and told to it, by whichever means: the protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from resilio_hpc.slurm.client.model import Job, Node, Partition


class SlurmClient(Protocol):
    """Every call ends within its time limit.

    It raises Unanswered when slurmctld did not answer (what was asked is then not known, and whether an order was
    carried out neither), SlurmError when Slurm refused, UsageError for what can never be right. A node or job that is
    not in an answer is not known to Slurm; a state that is not understood is UNKNOWN. Neither is a failure.
    """

    def describe(self) -> str:
        """Which means, and which Slurm, for people."""

    def nodes(self, names: Sequence[str] = ()) -> tuple[Node, ...]:
        """All nodes, or those of these names that Slurm knows."""

    def partitions(self) -> tuple[Partition, ...]:
        """All partitions."""

    def jobs(self, numbers: Sequence[str] = ()) -> tuple[Job, ...]:
        """All jobs that slurmctld remembers, or those of these numbers; all records of a job array."""

    def node_updates(self) -> int | None:
        """How many orders to nodes slurmctld has carried out, of all users; None when it does not tell."""

    def drain(self, nodes: Sequence[str], reason: str) -> None:
        """Let no new job start there. Replaces whatever reason is there: see ``drain.writer`` for manners."""

    def reword(self, nodes: Sequence[str], reason: str) -> None:
        """Another reason for drained nodes."""

    def undrain(self, nodes: Sequence[str]) -> None:
        """End a drain; a node that is DOWN stays so."""

    def resume(self, nodes: Sequence[str]) -> None:
        """Back into service, also from DOWN."""

    def set_weight(self, nodes: Sequence[str], weight: int) -> None:
        """Slurm fills nodes of a low weight first."""

    def set_features(self, nodes: Sequence[str], available: Sequence[str], active: Sequence[str] | None = None) -> None:
        """Set the features that jobs may ask for, and which of them the nodes have now."""

    def comment_nodes(self, nodes: Sequence[str], comment: str) -> None:
        """Set the nodes' Comment."""

    def submit(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
        """sbatch; returns the job's number. Raises SubmitLimit too."""

    def update_job(self, job: str, changes: Mapping[str, str]) -> None:
        """``scontrol update JobId=…`` by scontrol's names: ``{"NumNodes": "4"}``."""

    def comment_job(self, job: str, comment: str) -> None:
        """Set the job's Comment."""

    def cancel(self, job: str, signal: str | None = None) -> None:
        """Cancel a job, or send its steps a signal."""

    def requeue(self, job: str) -> None:
        """End a job's present run and queue it again."""
