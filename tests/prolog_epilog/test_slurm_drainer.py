"""From a check to a drain in Slurm and back, with a model of slurmctld; with a real one: test_on_slurm."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.prolog_epilog.drain.node_drains import SlurmDrainer
from resilio_hpc.slurm.client.command_client import CommandClient
from resilio_hpc.slurm.drain.policy import DrainPolicy
from resilio_hpc.slurm.drain.writer import ACT, OBSERVE, DrainWriter
from resilio_hpc.slurm.orders.audit import AuditLog
from tests.support.slurm.fake_slurmctld import FakeNode, FakeSlurmctld

POLICY = DrainPolicy(share=0.1, at_least=2, window_s=600, passes=3)


def drainer_of(
    slurm: FakeSlurmctld, mode: str = ACT, log: Path | None = None, policy: DrainPolicy = POLICY
) -> SlurmDrainer:
    client = CommandClient(slurm)
    writer = DrainWriter(client, policy, AuditLog(log), mode, clock=lambda: slurm.now, sleep=lambda seconds: None)
    return SlurmDrainer(client, writer)


@pytest.fixture
def slurm() -> FakeSlurmctld:
    return FakeSlurmctld({f"n{number}": FakeNode() for number in range(1, 5)})


def test_a_node_is_drained_held_and_given_back(slurm: FakeSlurmctld) -> None:
    drainer = drainer_of(slurm)
    assert drainer.held("n1") == frozenset()
    assert drainer.drain("n1", "gpu-xid", "Xid 79").result == "drained"
    assert drainer.drain("n1", "disk-space", "full").result == "reworded"
    assert drainer.drain("n1", "disk-space", "full").result == "nothing"
    assert drainer.held("n1") == {"gpu-xid", "disk-space"}
    assert drainer.undrain("n1", "gpu-xid", 2) == ""
    assert drainer.undrain("n1", "gpu-xid", 3).startswith("reworded: gpu-xid")
    assert drainer.undrain("n1", "disk-space", 3).startswith("undrained: disk-space")
    assert not slurm.nodes["n1"].drain


def test_an_administrators_drain_is_neither_ours_to_hold_nor_to_end(slurm: FakeSlurmctld) -> None:
    slurm.update(["NodeName=n1", "State=DRAIN", "Reason=new fan"])
    drainer = drainer_of(slurm)
    assert drainer.drain("n1", "gpu-xid", "Xid 79").result == "left"
    assert drainer.held("n1") == frozenset()
    assert drainer.undrain("n1", "gpu-xid", 3).startswith("left: gpu-xid")
    assert slurm.nodes["n1"].reason == "new fan"


def test_a_storm_withholds_drains_and_says_why(slurm: FakeSlurmctld) -> None:
    drainer = drainer_of(slurm)
    answers = [drainer.drain(name, "mount-latency", "no answer") for name in slurm.nodes]
    assert [answer.result for answer in answers] == ["drained", "drained", "storm", "storm"]
    assert "look for a cause that they share" in answers[2].why
    assert not slurm.nodes["n3"].drain


def test_a_check_that_fails_on_too_many_nodes_only_warns_on_the_others(slurm: FakeSlurmctld) -> None:
    drainer = drainer_of(slurm, policy=msgspec.structs.replace(POLICY, check_share=0.1))
    answers = [drainer.drain(name, "mount-present", "/data is not mounted") for name in slurm.nodes]
    assert [answer.result for answer in answers] == ["drained", "drained", "shared", "shared"]
    assert "2 of 4 nodes of partition main are drained for mount-present, 2 are allowed" in answers[2].why


def test_a_drain_that_slurm_made_itself_is_offered_once_when_it_has_passed(
    slurm: FakeSlurmctld, tmp_path: Path
) -> None:
    slurm.update(["NodeName=n1", "State=DRAIN", "Reason=Kill task failed"])
    drainer = drainer_of(slurm, log=tmp_path / "log")
    assert drainer.offer("n1", 3) == ""  # nobody has looked yet
    assert drainer.held("n1") == frozenset()
    said = [drainer.offer("n1", passes) for passes in (2, 3, 4)]
    assert said == [
        "", "offered: drained by Slurm: Kill task failed; resilio undrain --kill-task-failed n1", "",
    ]  # fmt: skip
    assert slurm.nodes["n1"].drain and (tmp_path / "log").read_text().count("offered") == 1
    slurm.now += 1
    slurm.update(["NodeName=n1", "State=DRAIN", "Reason=Kill task failed"])
    drainer.held("n1")
    assert drainer.offer("n1", 3) != ""  # it happened again
    slurm.update(["NodeName=n1", "State=DRAIN", "Reason=Prolog error"])
    drainer.held("n1")
    assert drainer.offer("n1", 9) == ""


def test_a_drain_for_our_own_failed_prolog_is_made_ours_and_no_other(slurm: FakeSlurmctld) -> None:
    drainer = drainer_of(slurm)
    slurm.update(["NodeName=n1", "State=DRAIN", "Reason=Prolog error"])
    drainer.held("n1")
    assert drainer.drained()
    for failed_s in (slurm.now - 700.0, slurm.now + 70.0):  # another one
        assert drainer.adopt("n1", "gpu-xid", "prolog of job 7: Xid 95", failed_s) == ""
    assert drainer.adopt("n1", "gpu-xid", "prolog of job 7: Xid 95", slurm.now - 2.0).startswith("adopted: ")
    assert slurm.nodes["n1"].reason.startswith("resilio:gpu-xid: prolog of job 7: Xid 95 #")
    assert drainer.undrain("n1", "gpu-xid", 3).startswith("undrained: ")
    slurm.update(["NodeName=n2", "State=DRAIN", "Reason=new fan"])
    assert drainer.adopt("n2", "gpu-xid", "prolog of job 7", float(slurm.now)) == ""
    assert slurm.nodes["n2"].reason == "new fan"


def test_a_node_that_slurm_does_not_know_is_named(slurm: FakeSlurmctld) -> None:
    drainer = drainer_of(slurm)
    with pytest.raises(SlurmError, match="no node host17: set SLURMD_NODENAME"):
        drainer.held("host17")
    outcome = drainer.drain("host17", "gpu-xid", "Xid 79")
    assert (outcome.result, outcome.why) == ("unknown", "Slurm knows no such node")


def test_who_observes_drains_nothing_and_leaves_a_trace(slurm: FakeSlurmctld, tmp_path: Path) -> None:
    assert drainer_of(slurm, OBSERVE, tmp_path / "log").drain("n1", "gpu-xid", "Xid 79").result == "would-act"
    assert slurm.orders == []
    assert "would-act" in (tmp_path / "log").read_text()


def test_a_slurm_that_is_away_is_no_answer(slurm: FakeSlurmctld) -> None:
    slurm.away = True
    drainer = drainer_of(slurm)
    outcome = drainer.drain("n1", "gpu-xid", "Xid 79")
    assert outcome.result == "unknown" and "Unable to contact" in outcome.why
    with pytest.raises(SlurmError, match="Unable to contact"):
        drainer.held("n1")
    with pytest.raises(SlurmError, match="Unable to contact"):
        drainer.undrain("n1", "gpu-xid", 3)
