"""The client of a site with pyslurm: nodes are read through it, in some milliseconds, all else by the commands."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from resilio_hpc.slurm.client.answers import Garbled
from resilio_hpc.slurm.client.command_client import CommandClient
from resilio_hpc.slurm.client.commands import TIMEOUT_S
from resilio_hpc.slurm.client.model import Node
from resilio_hpc.slurm.client.node_json import parse_nodes
from resilio_hpc.slurm.client.orders import check_nodes
from resilio_hpc.slurm.client.pyslurm_reader import PyslurmLost, PyslurmReader
from resilio_hpc.slurm.client.runner import Runner, run_here
from resilio_hpc.slurm.client.slurm_errors import Unanswered

# these change by themselves between two questions
_CHANGES = {"state", "cpus_allocated", "memory_allocated_mb", "gres_used"}


class PyslurmClient(CommandClient):
    """A client whose nodes have no ``gres_used``. Once pyslurm fails, the commands are asked."""

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
        found: tuple[Node, ...] = ()
        if self._reader is not None and len(names) <= 1:
            try:
                found = parse_nodes(self._reader.nodes(names, self._timeout_s))
            except (PyslurmLost, Garbled):
                self._reader = None
            except Unanswered:  # or no such node: the commands know which
                found = ()
        return found or super().nodes(names)

    def agrees(self) -> bool:
        """Return whether pyslurm and the commands tell the same nodes: a pyslurm built for another Slurm does not."""
        through_commands = {node.name: _lasting(node) for node in super().nodes()}
        through_pyslurm = {node.name: _lasting(node) for node in self.nodes()}
        return self._reader is not None and through_pyslurm == through_commands


def _lasting(node: Node) -> tuple[object, ...]:
    return tuple(value for name, value in _fields(node) if name not in _CHANGES)


def _fields(node: Node) -> list[tuple[str, object]]:
    return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
