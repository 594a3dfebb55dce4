"""The outcome for one node: one enum for the commands, the audit log and the node daemon."""

from __future__ import annotations

from dataclasses import dataclass

from resilio_hpc.core.compat import StrEnum


class DrainResult(StrEnum):
    """The results. Code that acts on one names them all: ``match`` with ``assert_never``."""

    DRAINED = "drained"  # the node is drained, for this package's reason
    REWORDED = "reworded"  # drained by this package before; the reason names the checks that hold it now
    UNDRAINED = "undrained"  # this package's drain is ended
    NOTHING = "nothing"  # nothing had to be done
    LEFT = "left"  # another owner's, so not touched
    OFFERED = "offered"  # a drain of Slurm's own may be ended, by a person
    WOULD_ACT = "would-act"  # what would be done (observing, or a dry run)
    STORM = "storm"  # too many drains, so not drained: look for a common cause
    SHARED = "shared"  # too many nodes are held for this check, so not drained: look for a common cause
    OVERTAKEN = "overtaken"  # another order changed the node just after the write: that one stays
    # another order came at the moment of the write: drained, and no longer this package's to end
    CONTESTED = "contested"
    UNKNOWN = "unknown"  # Slurm did not answer, or not clearly: nothing is known, nothing more was written
    REFUSED = "refused"  # Slurm refused


@dataclass(frozen=True)
class DrainOutcome:
    """An outcome. ``why``: as text. ``unanswered``: slurmctld gave no answer."""

    node: str
    result: DrainResult
    why: str
    unanswered: bool = False
