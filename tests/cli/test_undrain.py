"""``resilio undrain`` right after a repair: no prolog fails for the old verdict; what comes of the check is said."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import pytest

from resilio_hpc.cli.undrain import end
from resilio_hpc.prolog_epilog.drain.node_drains import DRAINED_LEAVE_S
from resilio_hpc.slurm.client.command_client import CommandClient
from resilio_hpc.slurm.drain.outcome import DrainOutcome
from resilio_hpc.slurm.drain.policy import DrainPolicy
from resilio_hpc.slurm.drain.reason import BY_HAND, Finding
from resilio_hpc.slurm.drain.writer import DrainWriter
from resilio_hpc.slurm.orders.audit import AuditLog
from tests.support.slurm.fake_slurmctld import FakeNode, FakeSlurmctld

POLICY = DrainPolicy(share=1.0, at_least=9, window_s=600, passes=3)


@dataclass
class Site:
    """A model of slurmctld, a node that is drained, and what its checks find when they look again."""

    fails: Mapping[str, str] | None = None
    slurm: FakeSlurmctld = field(default_factory=lambda: FakeSlurmctld({"n1": FakeNode()}))
    slept: list[float] = field(default_factory=list)
    looked: list[tuple[str, list[str]]] = field(default_factory=list)

    def drained(self, check: str, ago_s: int) -> None:
        self._writer().drain("n1", Finding(check, "Xid 95"))
        self.slurm.now += ago_s

    def end(self, check: str | None = None) -> DrainOutcome:
        return end("n1", check, self._writer(), CommandClient(self.slurm), self._look, self.slurm.time, self._sleep)

    def _writer(self) -> DrainWriter:
        return DrainWriter(
            CommandClient(self.slurm), POLICY, AuditLog(None), clock=self.slurm.time, sleep=self.slurm.sleep
        )

    def _look(self, node: str, checks: Collection[str]) -> Mapping[str, str] | None:
        assert self.slurm.nodes["n1"].drain  # before the drain is ended
        self.looked.append((node, list(checks)))
        return self.fails

    def _sleep(self, seconds: float) -> None:
        assert self.slurm.nodes["n1"].drain
        self.slept.append(seconds)


def test_no_drain_is_ended_while_prologs_have_leave_to_fail(capsys: pytest.CaptureFixture[str]) -> None:
    site = Site()
    site.drained("gpu-xid", ago_s=5)
    assert site.end().result == "undrained"
    assert site.slept == [DRAINED_LEAVE_S - 4] and "n1: its prologs may still fail" in capsys.readouterr().err
    site.drained("gpu-xid", ago_s=60)
    site.end()
    assert len(site.slept) == 1


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (None, "its node daemon looks at gpu-xid again, and drains it again where that still fails"),
        ({}, "gpu-xid looked again and found nothing"),
        ({"gpu-xid": "Xid 95"}, "gpu-xid still fails (Xid 95): it will be drained again"),
    ],
)
def test_what_comes_of_the_check_is_said(fails: Mapping[str, str] | None, said: str) -> None:
    site = Site(fails)
    site.drained("gpu-xid", ago_s=60)
    outcome = site.end()
    assert outcome.result == "undrained" and outcome.why.endswith(said)
    assert site.looked == [("n1", ["gpu-xid"])]


def test_a_persons_drain_is_ended_at_once_and_others_stay() -> None:
    site = Site()
    site.drained(BY_HAND, ago_s=1)
    assert site.end().result == "undrained"
    site.slurm.update(["NodeName=n1", "State=DRAIN", "Reason=Prolog error"])
    outcome = site.end()
    assert outcome.result == "left" and "the node's daemon takes it over" in outcome.why
    assert (site.slept, site.looked) == ([], [])
