"""Which faults a campaign draws, when, and whom they meet. Pure, but for the random numbers, which have a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from resilio_hpc.core.errors import UsageError
from resilio_hpc.drills.kind import Act

DOWN_S = 10.0  # a node that lost power, or its network, is back after so long


@dataclass(frozen=True)
class CampaignFault:
    """A fault that may be drawn. ``weight``: how often, beside the others.

    ``acts``: as of a drill; ``after_s`` counts from the fault. Roles: target (a node of the run, drawn by chance),
    leader (the controller's). ``takes_node``: the run goes on with a node less for a while.
    ``needs_fuse``: the shared directory must be able to hang.
    """

    name: str
    weight: float
    acts: tuple[Act, ...]
    takes_node: bool = False
    needs_fuse: bool = False


FAULTS: tuple[CampaignFault, ...] = (
    CampaignFault("rank killed", 6.0, (Act("kill_rank", "target"),)),
    CampaignFault("rank stopped", 2.0, (Act("stop_rank", "target"),)),  # its peers wait in a collective
    CampaignFault("agent killed", 2.0, (Act("kill_agent", "target"),)),
    CampaignFault("controller's agent killed", 1.0, (Act("kill_agent", "leader"),)),
    CampaignFault("node loses power", 2.0, (Act("power_off", "target"), Act("boot", "target", after_s=DOWN_S)), True),
    CampaignFault("node cut off", 1.0, (Act("partition", "target"), Act("heal", "target", after_s=DOWN_S)), True),
    CampaignFault("slurmd dead", 1.0, (Act("kill_slurmd", "target"), Act("start_slurmd", "target", after_s=3.0))),
    CampaignFault("slurmctld dead", 0.5, (Act("kill_slurmctld"), Act("start_slurmctld", after_s=5.0))),
    CampaignFault("saver stopped", 1.0, (Act("stop_saver", "target"),)),
    CampaignFault("shared directory hangs", 1.0, (Act("hang_shared"), Act("release_shared", after_s=8.0)),
                  needs_fuse=True),
)  # fmt: skip
NAMES = tuple(fault.name for fault in FAULTS)


def chosen(weights: Mapping[str, float] | None, fuse: bool) -> dict[CampaignFault, float]:
    """Return the faults that may be drawn, with their weights. ``weights`` by name; None: all, as in the table.

    Raises UsageError for a name that is not known, and where none is left.
    """
    unknown = sorted(set(weights or ()) - set(NAMES))
    if unknown:
        raise UsageError(f"no fault {unknown[0]!r} for a campaign: known are {', '.join(NAMES)}")
    found = {
        fault: fault.weight if weights is None else weights[fault.name]
        for fault in FAULTS
        if (weights is None or weights.get(fault.name, 0.0) > 0.0) and (fuse or not fault.needs_fuse)
    }
    if not found:
        raise UsageError("no fault is left to draw: give one of them a weight above 0")
    return found


class FaultDraw:
    """Draws faults: a Poisson process with one mean time between them."""

    def __init__(self, seed: str, mtbf_s: float, faults: Mapping[CampaignFault, float]) -> None:
        self._random = random.Random(seed)
        self._mtbf_s = mtbf_s
        self._faults = faults

    def gap_s(self) -> float:
        """Return the seconds until the next fault."""
        return self._random.expovariate(1.0 / self._mtbf_s)

    def fault(self, may_take_node: bool) -> CampaignFault | None:
        """Return the next fault; None where only faults are left that take a node, and no node may be taken."""
        usable = [fault for fault in self._faults if may_take_node or not fault.takes_node]
        return self._random.choices(usable, [self._faults[fault] for fault in usable])[0] if usable else None

    def one_of(self, some: Sequence[str]) -> str:
        """Return one of these nodes."""
        return self._random.choice(some)

    def rank(self, some: Sequence[int]) -> int:
        """Return one of these ranks."""
        return self._random.choice(some)
