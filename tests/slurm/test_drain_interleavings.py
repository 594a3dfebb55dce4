"""However our drains and an administrator's meet, in whatever order: the administrator's stay."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from resilio_hpc.slurm.client.command_client import CommandClient
from resilio_hpc.slurm.drain.policy import drain_policy
from resilio_hpc.slurm.drain.reason import Finding, disowned_reason, read_reason
from resilio_hpc.slurm.drain.writer import DrainWriter
from resilio_hpc.slurm.orders.audit import AuditLog
from tests.support.slurm.drain_meetings import NODES, AdminAndUs
from tests.support.slurm.fake_slurmctld import FakeNode, FakeSlurmctld

POLICY = drain_policy()


class WithAModel(AdminAndUs):
    """Of slurmctld; with a real one: test_drains_on_slurm."""

    slurm: FakeSlurmctld

    def begin(self) -> FakeSlurmctld:
        return FakeSlurmctld({name: FakeNode() for name in NODES})

    @initialize(base=st.sampled_from(["IDLE", "MIXED", "ALLOCATED"]))
    def the_first_node_is(self, base: str) -> None:
        self.slurm.nodes["n1"].base = base


TestWithAModel = WithAModel.TestCase
TestWithAModel.settings = hypothesis.settings(max_examples=100, stateful_step_count=8, deadline=None)


class ForLong(WithAModel):
    """The same, with more meetings."""


@pytest.mark.slow
class TestForLong(ForLong.TestCase):  # type: ignore[name-defined, misc]
    settings = hypothesis.settings(max_examples=500, stateful_step_count=8, deadline=None)


def test_an_order_in_the_gap_is_noticed_and_the_node_is_no_longer_ours() -> None:
    slurm = FakeSlurmctld({"n1": FakeNode()})
    writer = DrainWriter(CommandClient(slurm), POLICY, AuditLog(None), breaker=False, sleep=lambda s: None)

    def bob(argv: Sequence[str]) -> None:
        if argv[:2] == ["scontrol", "update"]:
            slurm.between = lambda argv: None
            slurm.update(["NodeName=n1", "State=DRAIN", "Reason=bob"])

    slurm.between = bob
    assert writer.drain("n1", Finding("gpu.xid", "Xid 79")).result == "contested"
    assert slurm.nodes["n1"].drain
    assert read_reason(slurm.nodes["n1"].reason) is None
    assert writer.undrain("n1").result == "left"
    assert disowned_reason("x").startswith("resilio: x")
