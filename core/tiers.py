"""Where checkpoints are, and how far a save is: words that ranks, agents and controller share."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """Where a state was restored from, the nearest first; of several, the last one in this order."""

    MEMORY = "memory"
    """This node's memory, or what came there."""
    LOCAL = "local"
    """The node's own disk."""
    PEER = "peer"
    """Other nodes' disks."""
    COMMITTED = "committed"
    """The store of committed steps, which all nodes see."""


class Stage(StrEnum):
    """How far a save is, in order; FAILED: it will come no further."""

    NONE = "none"
    MEMORY = "memory"
    LOCAL = "local"
    COMMITTED = "committed"
    FAILED = "failed"
