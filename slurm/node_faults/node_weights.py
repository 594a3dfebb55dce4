"""Whether this package may change a node's weight in Slurm, and to what. Pure: this decides, others act.

It may change only the weight that the site gave the node (it had it when it was first seen), or one that it wrote
itself. Any other is an administrator's own and stays, until ``resilio nodes apply --adopt`` takes it for the site's.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

LARGEST = (1 << 32) - 1


class KnownWeight(msgspec.Struct, frozen=True, omit_defaults=True):
    """``site``: as the site gave it.

    ``ours``: weights that this package wrote, or was about to write when it died, the newest first; ``contested``: no
    longer its own.
    """

    site: int
    ours: tuple[int, ...] = ()
    contested: bool = False


class Step(enum.Enum):
    """One change of a node's weight."""

    SET = "set"
    RESTORE = "restore"
    NOTHING = "nothing"
    LEAVE = "leave"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class WeightDecision:
    """``weight``: to be written, for SET and RESTORE; ``known``: the record of the node from now on."""

    step: Step
    why: str
    known: KnownWeight | None
    weight: int = -1

    @property
    def writes(self) -> bool:
        return self.step in (Step.SET, Step.RESTORE)


def decide_weight(now: int | None, known: KnownWeight | None, add: int) -> WeightDecision:
    """Decide; ``now``: the node's weight in Slurm's last answer; ``add``: what its score adds, 0 for nothing."""
    if now is None:
        return WeightDecision(Step.UNKNOWN, "its weight could not be read", known)
    if known is None or known.site == now:  # a slurmctld that reads slurm.conf again forgets changes
        known = KnownWeight(site=now)
    if known.contested or now not in (known.site, *known.ours):
        why = f"weight {now} is an administrator's own (--adopt takes it for the site's)"
        return WeightDecision(Step.LEAVE, why, known)
    wanted = known.site + add
    if wanted > LARGEST:
        return WeightDecision(Step.LEAVE, f"weight {known.site} + {add} is more than Slurm allows", known)
    if now == wanted:
        kept = (now,) if now in known.ours else ()
        return WeightDecision(Step.NOTHING, f"weight {now}", KnownWeight(site=known.site, ours=kept))
    meant = KnownWeight(site=known.site, ours=tuple(dict.fromkeys((wanted, now))))
    if add:
        return WeightDecision(Step.SET, f"weight {now} to {wanted}", meant, wanted)
    return WeightDecision(Step.RESTORE, f"weight {now} back to {wanted}", meant, wanted)
