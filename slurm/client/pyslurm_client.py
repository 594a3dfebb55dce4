"""The client of a site with pyslurm: it is asked in a few milliseconds, and what it does not tell by the commands."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from resilio_hpc.slurm.client.answers import Garbled
from resilio_hpc.slurm.client.command_client import CommandClient, is_one_of
from resilio_hpc.slurm.client.commands import TIMEOUT_S
from resilio_hpc.slurm.client.job_json import parse_jobs
from resilio_hpc.slurm.client.model import Job, Node, Partition
from resilio_hpc.slurm.client.node_json import parse_nodes
from resilio_hpc.slurm.client.orders import check_job, check_nodes
from resilio_hpc.slurm.client.pyslurm_reader import PyslurmLost, PyslurmReader
from resilio_hpc.slurm.client.runner import Runner, run_here
from resilio_hpc.slurm.client.slurm_errors import Unanswered
from resilio_hpc.slurm.client.text_output import parse_partitions

Told = TypeVar("Told", Node, Job, Partition)

# these change by themselves between two questions
_CHANGES = {
    "state", "cpus_allocated", "memory_allocated_mb", "gres_used", "reason", "node_count", "nodes", "start_time",
    "end_time", "restarts",
}  # fmt: skip
_CHANGES_OF_NODES = _CHANGES - {"reason"}


class PyslurmClient(CommandClient):
    """A client whose nodes have no ``gres_used``. Once pyslurm fails, the commands are asked.

    Jobs of arrays, and those that wait for others, come from the commands.
    """

    def __init__(
        self,
        reader: PyslurmReader,
        run: Runner = run_here,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        super().__init__(run, timeout_s)
        self._reader: PyslurmReader | None = reader

    def nodes(self, names: Sequence[str] = ()) -> tuple[Node, ...]:
        """Return all nodes, or those of these names that Slurm knows."""
        check_nodes(names)
        asked = ["nodes", *names] if len(names) <= 1 else []
        return self._told(asked, parse_nodes) or super().nodes(names)

    def jobs(self, numbers: Sequence[str] = ()) -> tuple[Job, ...]:
        """Return all jobs that slurmctld remembers, or those of these numbers."""
        found = self._told(["jobs", *map(check_job, numbers)], parse_jobs)
        wanted = tuple(job for job in found if is_one_of(job, numbers)) if numbers else found
        return wanted or super().jobs(numbers)

    def partitions(self) -> tuple[Partition, ...]:
        """Return all partitions."""
        return self._told(["partitions"], _parse_partitions) or super().partitions()

    def agrees(self) -> bool:
        """Return whether pyslurm and the commands tell the same: a pyslurm built for another Slurm does not."""
        nodes = _same(super().nodes(), self.nodes(), _CHANGES_OF_NODES)
        partitions = nodes and _same(super().partitions(), self.partitions(), set())
        return partitions and self._agrees_on_jobs() and self._reader is not None

    def _agrees_on_jobs(self) -> bool:
        """Return whether jobs that both tell of are the same; others began or were forgotten meanwhile."""
        mine = {job.id: job for job in self._told(["jobs"], parse_jobs)}
        theirs = {job.id: job for job in super().jobs()} if mine else {}
        both = sorted(mine.keys() & theirs.keys())
        return _same([theirs[one] for one in both], [mine[one] for one in both], _CHANGES)

    def _told(self, question: Sequence[str], parse: Callable[[str], tuple[Told, ...]]) -> tuple[Told, ...]:
        """Return what pyslurm answers; nothing where it does not tell."""
        if self._reader is None or not question:
            return ()
        try:
            return parse(self._reader.answer(question, self._timeout_s))
        except (PyslurmLost, Garbled):
            self._reader = None
        except Unanswered:  # or it knows no such node, or does not tell that of jobs
            pass
        return ()


def _parse_partitions(answer: str) -> tuple[Partition, ...]:
    """Return the partitions of an answer. Raises Garbled, Unanswered."""
    try:
        said = json.loads(answer)
        lines = said.get("partitions")
    except (ValueError, AttributeError) as error:
        raise Garbled(f"pyslurm's partitions: {error}") from error
    if not isinstance(lines, str):
        raise Unanswered("pyslurm does not tell the partitions")
    return parse_partitions(lines)


def _same(theirs: Sequence[Any], mine: Sequence[Any], changes: set[str]) -> bool:
    """Return whether both tell the same, in whatever order, but for fields that change by themselves."""
    return _lasting(theirs, changes) == _lasting(mine, changes)


def _lasting(told: Sequence[Any], changes: set[str]) -> list[dict[str, object]]:
    ordered = sorted(told, key=lambda one: str(getattr(one, "id", one.name)))
    names = [field.name for one in ordered[:1] for field in dataclasses.fields(one) if field.name not in changes]
    return [{name: getattr(one, name) for name in names} for one in ordered]
