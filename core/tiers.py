"""Tiers of checkpoints and stages of a save: enums that ranks, agents and controller share."""

from __future__ import annotations

from resilio_hpc.core.compat import StrEnum


class Tier(StrEnum):
    """Where a state was restored from, the nearest first; of several, the furthest."""

    MEMORY = "memory"
    """This node's memory, or what came there."""
    LOCAL = "local"
    """The node's own disk."""
    PEER = "peer"
    """Other nodes' disks."""
    COMMITTED = "committed"
    """The store of committed steps, which all nodes see."""


class Stage(StrEnum):
    """The progress of a save, in order; FAILED: it cannot go on."""

    NONE = "none"
    MEMORY = "memory"
    LOCAL = "local"
    COMMITTED = "committed"
    FAILED = "failed"
