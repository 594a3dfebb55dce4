"""Faults that Slurm itself knows: nodes that slurmctld lost, and those that this package's checks drained. Pure.

A reader as root need not trust any user: only Slurm and its administrators write reasons.
"""

from __future__ import annotations

from collections.abc import Iterable

from resilio_hpc.slurm.client.model import Node
from resilio_hpc.slurm.drain.reason import BY_HAND, read_reason
from resilio_hpc.slurm.node_faults.fault import NodeFault, evidence

DRAINED_FOR_FAULTS = "node-faults"  # the check of a drain that followed from a score, so it is no fault of its own
# a node that an administrator or Slurm's power saving takes away is not faulty
_PLANNED = frozenset(
    {
        "MAINT", "MAINTENANCE", "POWERED_DOWN", "POWERING_DOWN", "POWERING_UP", "POWER_DOWN", "POWER_UP",
        "REBOOT_REQUESTED", "REBOOT_ISSUED",
    }
)  # fmt: skip
_REASONS = (("Not responding", "node-down"), ("Node unexpectedly rebooted", "rebooted"))


def faults_seen(nodes: Iterable[Node], cluster: str = "") -> list[NodeFault]:
    """Return the faults that the nodes' states and reasons show now.

    The same fault has the same time and so the same key, when it is seen again.
    """
    return [fault for node in nodes if node.reason_time is not None for fault in _of(node, cluster)]


def _of(node: Node, cluster: str) -> list[NodeFault]:
    assert node.reason_time is not None
    time = float(node.reason_time)
    ours = read_reason(node.reason) if node.state.drain else None
    if ours is not None:
        return [
            NodeFault(
                time=time, node=node.name, kind="health-fatal", check=one.check, cluster=cluster,
                evidence=evidence(one.evidence),
            )
            for one in ours
            if one.check not in (BY_HAND, DRAINED_FOR_FAULTS)
        ]  # fmt: skip
    kind = next((kind for begins, kind in _REASONS if node.reason.startswith(begins)), "")
    if not kind or node.state.base != "DOWN" or node.state.flags & _PLANNED:
        return []
    return [NodeFault(time=time, node=node.name, kind=kind, cluster=cluster, evidence=evidence(node.reason))]
