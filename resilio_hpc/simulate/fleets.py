"""How often a fleet fails, and in what way: published ones, and the user's own. Pure."""

from __future__ import annotations

import functools

import msgspec

from resilio_hpc.core.compat import StrEnum
from resilio_hpc.core.errors import UsageError
from resilio_hpc.simulate.constants import Constants, SourceKind, table


class FaultKind(StrEnum):
    """What a fault does to a run."""

    PROCESS = "process"  # a rank ends with an exception; its node is sound
    DEVICE = "device"  # a rank is killed by its GPU; the node lives
    NETWORK = "network"  # a rank is killed by its link; the node lives
    HANG = "hang"  # a rank does not go on
    NODE = "node"  # a node is silent, its memory is gone


class FleetNumber(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A constant as published for a fleet."""

    value: float
    kind: SourceKind
    source: str


class Fleet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Failure rates. ``per_gpu_day``: faults of a GPU, and what belongs to it, in a day; ``faults``: their kinds."""

    name: str
    source: str
    gpus: int
    gpus_per_node: int
    days: float
    per_gpu_day: float
    mix_source: str
    faults: dict[FaultKind, float]
    constants: dict[str, FleetNumber] = {}

    def mtbf_s(self, gpus: int) -> float:
        """Return the mean time between the faults of so many GPUs; infinite for none."""
        per_day = self.per_gpu_day * gpus
        return 86_400.0 / per_day if per_day > 0 else float("inf")

    def apply(self, constants: Constants) -> Constants:
        """Return the constants with those that are published for this fleet."""
        for name, one in self.constants.items():
            constants = constants.replaced({name: one.value}, one.kind, one.source)
        return constants


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fleet: list[Fleet]


@functools.cache
def fleets() -> dict[str, Fleet]:
    """Return the published fleets, by name."""
    return {fleet.name: fleet for fleet in msgspec.convert(table("fleets.toml"), _Table).fleet}


def fleet_named(name: str) -> Fleet:
    """Return a published fleet. Raises UsageError."""
    found = fleets().get(name)
    if found is None:
        raise UsageError(f"no fleet is named {name}: {', '.join(fleets())}; or give --mtbf-h")
    return found
