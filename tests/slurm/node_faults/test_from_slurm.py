"""What Slurm's own reasons say of nodes, and what they do not."""

from __future__ import annotations

import pytest

from resilio_hpc.slurm.client.model import Node
from resilio_hpc.slurm.client.states import node_state
from resilio_hpc.slurm.drain.reason import BY_HAND, Finding, write_reason
from resilio_hpc.slurm.node_faults.from_slurm import DRAINED_FOR_FAULTS, faults_seen

OURS = write_reason([Finding("gpu-xid", "Xid 79 on GPU 3"), Finding("disk-space", "full")])


def seen(state: list[str], reason: str, time: int | None = 1000) -> list[tuple[str, str]]:
    node = Node(name="n1", state=node_state(state), reason=reason, reason_time=time)
    return [(fault.kind, fault.check) for fault in faults_seen([node], "alpha")]


@pytest.mark.parametrize(
    ("state", "reason", "expected"),
    [
        (["IDLE", "DRAIN"], OURS, [("health-fatal", "gpu-xid"), ("health-fatal", "disk-space")]),
        (["IDLE", "DRAIN"], OURS.replace("Xid 79", "Xid 13"), []),  # somebody has edited it
        (["IDLE", "DRAIN"], write_reason([Finding(BY_HAND, "fan is loud")]), []),
        (["IDLE", "DRAIN"], write_reason([Finding(DRAINED_FOR_FAULTS, "score 3")]), []),  # or it would feed itself
        (["IDLE", "DRAIN"], "bob: disk", []),
        (["IDLE", "DRAIN"], "Not responding", []),
        (["DOWN", "NOT_RESPONDING"], "Not responding", [("node-down", "")]),
        (["DOWN", "DRAIN"], "Not responding [slurm@2026-01-01]", [("node-down", "")]),
        (["DOWN"], "Node unexpectedly rebooted", [("rebooted", "")]),
        (["DOWN", "MAINT"], "Not responding", []),
        (["DOWN", "POWERED_DOWN"], "Not responding", []),
        (["DOWN"], "bob: new fans", []),
        (["IDLE"], "", []),
        (["SPARKLING"], "Not responding", []),
    ],
)
def test_faults_and_what_are_none(state: list[str], reason: str, expected: list[tuple[str, str]]) -> None:
    assert seen(state, reason) == expected


def test_seen_again_it_is_the_same_and_without_a_time_it_is_none() -> None:
    node = Node(name="n1", state=node_state(["DOWN"]), reason="Not responding", reason_time=1000)
    assert {fault.key for _ in range(3) for fault in faults_seen([node], "alpha")} == {
        ("alpha", "n1", "node-down", "", "", "", "1000.0")
    }
    assert seen(["DOWN"], "Not responding", None) == []
