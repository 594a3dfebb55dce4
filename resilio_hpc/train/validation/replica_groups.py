"""Which ranks are replicas of each other: those that have the same part of the model. Pure."""

from __future__ import annotations

from typing import Protocol


class ReplicaPlace(Protocol):
    """A rank's place in the run; ``Run`` has it."""

    rank: int
    world_size: int
    tensor_parallel: int
    data_parallel: int


class ReplicaRound(ReplicaPlace, Protocol):
    """A rank's place in the present round of the run."""

    round: int


def group_name(rank: int, tensor_parallel: int, data_parallel: int) -> str:
    """Return the name of the ranks that have the same part of the model, in the order of ``Run.data_parallel_rank``."""
    return f"tp{rank % tensor_parallel} pp{rank // (tensor_parallel * data_parallel)}"


def replica_groups(place: ReplicaPlace) -> list[list[int]]:
    """Return the ranks of each group, in their order."""
    groups: dict[str, list[int]] = {}
    for rank in range(place.world_size):
        groups.setdefault(group_name(rank, place.tensor_parallel, place.data_parallel), []).append(rank)
    return list(groups.values())
