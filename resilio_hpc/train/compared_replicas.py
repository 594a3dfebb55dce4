"""What compares a rank's tensors with those of its replicas, for ranks that have some."""

from __future__ import annotations

from typing import Protocol

from resilio_hpc.ckpt.coordination.agent_link import AgentLink
from resilio_hpc.train.last_step import StepHolder


class AtBoundary(Protocol):
    """Does its part at each step boundary."""

    def at_boundary(self, completed: int) -> None:
        """Take note that ``completed`` steps are done."""


def group_name(rank: int, tensor_parallel: int, data_parallel: int) -> str:
    """Return the name of the ranks that have the same part of the model, in the order of ``Run.data_parallel_rank``."""
    return f"tp{rank % tensor_parallel} pp{rank // (tensor_parallel * data_parallel)}"


def sweep_of(
    holder: StepHolder | None, link: AgentLink | None, group: str, replicas: int, within: int
) -> AtBoundary | None:
    """Return what digests this rank's tensors, where ``replicas`` ranks have the same. ``within``: steps."""
    if holder is None or link is None or not holder.shared or within < 1 or replicas < 2:
        return None
    from resilio_hpc.train.validation.replica_digests import ReplicaSweep  # imports torch

    return ReplicaSweep(holder.state, group, replicas, link.send, within)
