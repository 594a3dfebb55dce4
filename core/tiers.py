"""Tiers of checkpoints, stages of a save, and room for snapshots: enums that ranks, agents and controller share."""

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


class SnapshotRoom(StrEnum):
    """Where a rank's snapshots have room, the best first."""

    MEMORY = "memory"
    """Two of them in shared memory."""
    DISK = "disk"
    """Two, at least one of them in a file on the node's disk."""
    ONE = "one"
    """One alone: each is written over the one before."""
    REDUCED = "reduced"
    """For what no other rank of the node has."""
    NONE = "none"
    """No new one."""


class Stage(StrEnum):
    """The progress of a save, in order; FAILED: it cannot go on."""

    NONE = "none"
    MEMORY = "memory"
    LOCAL = "local"
    COMMITTED = "committed"
    FAILED = "failed"
