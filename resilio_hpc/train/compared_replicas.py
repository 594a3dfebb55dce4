"""What compares a rank's tensors with those of its replicas, for ranks that have some."""

from __future__ import annotations

import sys
from typing import Protocol

from resilio_hpc.ckpt.coordination.agent_link import AgentLink
from resilio_hpc.train.last_step import StepHolder
from resilio_hpc.train.validation.replica_groups import ReplicaPlace, group_name


class AtBoundary(Protocol):
    """Does its part at each step boundary."""

    def at_boundary(self, completed: int) -> None:
        """Take note that ``completed`` steps are done."""


def sweep_of(holder: StepHolder | None, link: AgentLink | None, place: ReplicaPlace, within: int) -> AtBoundary | None:
    """Return what digests this rank's tensors, where other ranks have the same. ``within``: steps.

    None where torch is not loaded: then the state has no tensor of it, and to import it would take seconds.
    """
    replicas = place.data_parallel
    if "torch" not in sys.modules:
        return None
    if holder is None or link is None or not holder.replicated or within < 1 or replicas < 2:
        return None
    group = group_name(place.rank, place.tensor_parallel, replicas)
    from resilio_hpc.train.validation.replica_digests import ReplicaSweep  # imports torch

    return ReplicaSweep(holder.state, group, replicas, link.send, within)
