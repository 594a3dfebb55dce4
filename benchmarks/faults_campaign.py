"""Which drills are repeated most: the faults that every run must come over, by subject.

``benchmarks/faults.py --campaign`` does them in both ways in. A drill that exists in one way only is done in that one.
"""

from __future__ import annotations

from resilio_hpc.drills.kind import Drill
from resilio_hpc.drills.table import DRILLS

SUBJECTS: dict[str, tuple[str, ...]] = {
    "srun SIGKILL": ("srun SIGKILL", "srun SIGKILL, chain"),
    "batch host loses power": ("batch host power cut", "batch host power cut, chain"),
    "one node cut off": ("one node cut off",),
    "cut in halves": ("cut in halves, controller with slurmctld", "cut in halves, controller apart"),
    "healed cut": ("healed cut, then another node is lost",),
    "either of two nodes lost": (
        "two nodes, the other loses power",
        "two nodes, the controller's loses power",
        "two nodes, the other is cut off",
        "two nodes, the controller's is cut off",
    ),
    "slurmd dead": ("slurmd dead for a moment", "slurmd dead for long"),
    "slurmctld dead for 20 s": ("slurmctld dead for 20 s, a rank killed inside",),
    "shared directory hangs for 60 s": (
        "shared directory hangs for 60 s",
        "shared directory hangs for 60 s, a rank killed inside",
        "shared directory hangs for 60 s, controller's agent killed inside",
    ),
    "a node comes back": ("a lost node boots again", "a lost node boots again, chain"),
    "join": ("a joiner replaces a lost node",),
    "grow back": ("grow back with a healed node", "grow back with a joiner"),
    "preemption": ("preempted, cancel", "preempted, requeue"),
    "requeue": ("scontrol requeue",),
    "NODE_FAIL": ("NODE_FAIL of a job that Slurm ends",),
    "scancel": ("scancel", "scancel -s KILL"),
    "a fault during recovery": (
        "two ranks killed, the second during recovery",
        "the controller's agent killed during a rank's recovery",
    ),
    "two faults at once": ("a rank killed and another node's power cut",),
}


def in_campaign(drill: Drill) -> bool:
    """Whether the drill belongs to the campaign."""
    return any(drill.name in names for names in SUBJECTS.values())


def campaign() -> list[Drill]:
    """Return the campaign's drills, in the order of its subjects, batch-script mode first."""
    order = [name for names in SUBJECTS.values() for name in names]
    return sorted(filter(in_campaign, DRILLS), key=lambda drill: (drill.srun, order.index(drill.name)))
