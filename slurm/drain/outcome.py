"""What became of one node: the words of the commands, of the audit log and of the node daemon."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class DrainResult(enum.StrEnum):
    """Who acts on one names them all: ``match`` with ``assert_never``."""

    DRAINED = "drained"  # the node is drained, for our reason
    REWORDED = "reworded"  # drained by us before; the reason names the checks that hold it now
    UNDRAINED = "undrained"  # our drain is ended
    NOTHING = "nothing"  # nothing had to be done
    LEFT = "left"  # another's: not touched
    OFFERED = "offered"  # a drain of Slurm's own may be ended: a person may do so
    WOULD_ACT = "would-act"  # what would be done (observing, or a dry run)
    STORM = "storm"  # too many drains: not drained, look for a cause that they share
    SHARED = "shared"  # too many nodes are held for this check: not drained, look for a cause that they share
    OVERTAKEN = "overtaken"  # another order changed the node just after our write: that one stays
    CONTESTED = "contested"  # another order came at the moment of our write: drained, and no longer ours to end
    UNKNOWN = "unknown"  # Slurm did not answer, or not clearly: nothing is known, nothing more was written
    REFUSED = "refused"  # Slurm refused


@dataclass(frozen=True)
class DrainOutcome:
    """``why``: in words. ``unanswered``: slurmctld gave no answer."""

    node: str
    result: DrainResult
    why: str
    unanswered: bool = False
