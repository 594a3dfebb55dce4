"""What an agent's replicator is doing: one step of a partner that is copied, snapshots that ranks wait for."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct, field

from resilio_hpc.launch.protocol import messages as m


class CopyUnderWay(Struct):
    """One step of a partner that is being copied."""

    step: int
    ranks: range
    world_size: int


class RestoreUnderWay(Struct):
    """Snapshots that ranks wait for."""

    round: int
    point: m.RestorePoint
    missing: set[int] = field(default_factory=set)  # numbers of the fetches under way
    then: list[Callable[[], None]] = field(default_factory=list)
