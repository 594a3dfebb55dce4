"""Scores become weights and drains, and go back; what an administrator set stays. With a model of slurmctld."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc.core.errors import HealthError, SlurmError
from resilio_hpc.slurm.client.command_client import CommandClient
from resilio_hpc.slurm.drain.policy import DrainPolicy
from resilio_hpc.slurm.drain.reason import Finding, read_reason, write_reason
from resilio_hpc.slurm.drain.writer import ACT, DRY_RUN, OBSERVE, DrainWriter
from resilio_hpc.slurm.node_faults.node_weights import KnownWeight, Step, decide_weight
from resilio_hpc.slurm.node_faults.policy import fault_policy
from resilio_hpc.slurm.node_faults.score import NodeScore
from resilio_hpc.slurm.node_faults.weight_file import WeightFile
from resilio_hpc.slurm.node_faults.weight_updater import Steered, Steering
from resilio_hpc.slurm.orders.audit import AuditLog
from tests.support.slurm.fake_slurmctld import FakeNode, FakeSlurmctld

POLICY = fault_policy()
DRAINS = DrainPolicy(share=0.1, at_least=2, window_s=600, passes=3)


class Site:
    """A cluster, its file of weights, and what ``apply`` told."""

    def __init__(self, folder: Path) -> None:
        self.slurm = FakeSlurmctld({f"n{number}": FakeNode(weight=10) for number in range(1, 5)})
        self.weights = WeightFile(folder)
        self.log = folder / "audit.jsonl"

    def apply(self, mode: str = ACT, adopt: bool = False, **scores: float) -> dict[str, str]:
        """``n1=2.0``: what became of each node of which something was told."""
        client, audit = CommandClient(self.slurm), AuditLog(self.log)
        options: dict[str, Any] = {"clock": lambda: self.slurm.now, "sleep": lambda seconds: None}
        steering = Steering(
            client, DrainWriter(client, DRAINS, audit, mode, **options), self.weights, audit, POLICY, mode, **options
        )
        told: list[Steered] = []
        scored = {name: NodeScore(name, score, ()) for name, score in scores.items()}
        with self.weights.locked():
            steering.apply(client.nodes(), scored, told.append, adopt)
        return {f"{one.node} {one.act}": one.result for one in told if one.result != "nothing"}

    @property
    def now(self) -> list[int]:
        return [node.weight for node in self.slurm.nodes.values()]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_weights_follow_the_score_and_come_back_to_the_sites(site: Site) -> None:
    assert site.apply() == {}
    assert site.apply(n1=0.6) == {"n1 weight": "set"}
    assert site.now == [1010, 10, 10, 10]
    assert site.apply(n1=0.6) == {}
    assert site.apply(n1=2.0, n2=0.5) == {"n1 weight": "set", "n2 weight": "set"}
    assert site.now == [10010, 1010, 10, 10]
    assert site.apply(n1=0.7) == {"n1 weight": "set", "n2 weight": "restored"}
    assert site.apply() == {"n1 weight": "restored"}
    assert site.now == [10, 10, 10, 10]
    assert len(site.slurm.orders) == 6  # one for each change, and no more


def test_a_node_is_drained_at_the_threshold_and_given_back_below(site: Site) -> None:
    assert site.apply(n1=3.2)["n1 drain"] == "drained"
    (held,) = read_reason(site.slurm.nodes["n1"].reason) or ()
    assert (held.check, held.evidence.split(":")[0]) == ("node-faults", "score 3.20")
    assert "n1 drain" not in site.apply(n1=3.1)
    assert "n1 drain" not in site.apply(n1=1.6)  # not back and forth
    assert site.apply(n1=1.4)["n1 drain"] == "undrained"
    assert not site.slurm.nodes["n1"].drain


def test_a_drain_of_a_health_check_stays_when_the_score_falls(site: Site) -> None:
    site.slurm.nodes["n1"] = FakeNode(drain=True, reason=write_reason([Finding("gpu-xid", "Xid 79")]), weight=10)
    assert site.apply(n1=3.2)["n1 drain"] == "reworded"
    assert site.apply()["n1 drain"] == "reworded"
    assert read_reason(site.slurm.nodes["n1"].reason) == (Finding("gpu-xid", "Xid 79"),)


def test_an_administrators_drain_is_left(site: Site) -> None:
    site.slurm.nodes["n1"] = FakeNode(drain=True, reason="bob: disk", weight=10)
    assert site.apply(n1=9.0)["n1 drain"] == "left"
    assert site.slurm.nodes["n1"].reason == "bob: disk"


def test_the_storm_breaker_holds_for_these_drains_too(site: Site) -> None:
    told = site.apply(n1=4.0, n2=4.0, n3=4.0)
    assert [told[f"n{n} drain"] for n in (1, 2, 3)] == ["drained", "drained", "storm"]


def test_an_administrators_weight_is_never_overwritten(site: Site) -> None:
    site.apply()
    site.slurm.update(["NodeName=n1", "Weight=500"])  # by hand, before we have anything against it
    assert site.apply(n1=2.0, n2=0.6) == {"n1 weight": "left", "n2 weight": "set"}
    site.slurm.update(["NodeName=n2", "Weight=7"])  # by hand, after we have written
    assert site.apply(n1=2.0, n2=2.0) == {"n1 weight": "left", "n2 weight": "left"}
    assert site.apply() == {}
    assert site.now == [500, 7, 10, 10]
    site.slurm.update(["NodeName=n2", "Weight=10"])  # as the site has it: nobody's own any more
    assert site.apply(n2=0.6) == {"n2 weight": "set"}


def test_weights_are_taken_for_the_sites_when_somebody_says_so(site: Site) -> None:
    site.apply(n3=0.6)
    site.slurm.update(["NodeName=n[1-2]", "Weight=500"])
    assert site.apply(n1=0.6, n3=0.6) == {"n1 weight": "left"}
    assert site.apply(n1=0.6, n3=0.6, adopt=True) == {"n1 weight": "set"}
    assert site.now == [1500, 500, 1010, 10]  # n3's was ours, and is not taken for the site's
    assert site.apply() == {"n1 weight": "restored", "n3 weight": "restored"}
    assert site.now == [500, 500, 10, 10]


def test_a_slurmctld_that_forgot_our_weight_is_told_again(site: Site) -> None:
    site.apply(n1=0.6)
    site.slurm.update(["NodeName=n1", "Weight=10"])  # it has read slurm.conf anew
    assert site.apply(n1=0.6) == {"n1 weight": "set"}
    assert site.now[0] == 1010


@pytest.mark.parametrize("mode", [DRY_RUN, OBSERVE])
def test_nothing_is_ordered_in_a_dry_run_or_observing(site: Site, mode: str) -> None:
    assert site.apply(mode, n1=3.5) == {"n1 weight": "would-act", "n1 drain": "would-act"}
    assert site.slurm.orders == []
    assert site.weights.read() == {}


def test_an_order_that_came_at_the_same_moment_makes_the_weight_nobodys(site: Site) -> None:
    site.apply()

    def admin(argv: Sequence[str]) -> None:
        if "Weight=1010" in argv:
            site.slurm.between = lambda argv: None
            site.slurm.update(["NodeName=n4", "Weight=10"])

    site.slurm.between = admin
    assert site.apply(n1=0.6) == {"n1 weight": "contested"}
    assert site.apply() == {}
    assert site.now[0] == 1010  # it may be an administrator's now: a person looks
    assert site.apply(adopt=True) == {}
    assert site.apply(n1=0.6) == {"n1 weight": "set"}


@pytest.mark.parametrize("at", range(8))
def test_who_dies_or_loses_slurmctld_at_any_step_knows_its_weight_again(site: Site, at: int) -> None:
    site.apply()
    step = 0

    def between(argv: Sequence[str]) -> None:
        nonlocal step
        site.slurm.away = step >= at
        step += 1

    site.slurm.between = between
    with contextlib.suppress(SlurmError):  # of the very first question; of later ones the outcome tells
        site.apply(n1=0.6)
    site.slurm.between, site.slurm.away = (lambda argv: None), False
    site.apply()
    assert site.now == [10, 10, 10, 10]


def test_without_the_file_of_weights_being_whole_nothing_is_written(site: Site, tmp_path: Path) -> None:
    site.apply(n1=0.6)
    (tmp_path / "weights.json").write_text('{"nodes": ')
    with pytest.raises(HealthError, match=r"weights\.json is damaged"):
        site.apply()
    assert site.now[0] == 1010


def test_two_at_a_time_are_one_too_many(site: Site) -> None:
    with site.weights.locked(), pytest.raises(HealthError, match="another resilio nodes apply"):
        site.apply()


def test_all_of_it_is_in_the_audit_log(site: Site) -> None:
    site.apply(n1=3.2)
    entries = [json.loads(line) for line in site.log.read_text().splitlines()]
    assert [(entry["act"], entry["result"]) for entry in entries] == [
        ("weight", "set"), ("drain", "drain"), ("drain", "drained"),
    ]  # fmt: skip
    assert entries[0]["evidence"] == "weight 10 to 10010"


SCORE = st.tuples(st.just("score"), st.sampled_from([0, 1000, 10000]))
ADMIN = st.tuples(st.just("admin"), st.integers(0, 20))
RESET = st.tuples(st.just("reset"), st.just(0))


@given(st.lists(st.one_of(SCORE, ADMIN, RESET), max_size=30))
def test_whatever_comes_in_whatever_order_an_administrators_last_word_stands(steps: list[tuple[str, int]]) -> None:
    """A node whose site weight is 5: an administrator's own (other than 5) is never changed by us."""
    now, known, theirs = 5, decide_weight(5, None, 0).known, False
    for who, number in steps:
        if who == "admin":
            now, theirs = number, number != 5 and (known is None or number not in known.ours)
        elif who == "reset":
            now, theirs = 5, False
        else:
            decision = decide_weight(now, known, number)
            assert not (decision.writes and theirs)
            known, now = decision.known, decision.weight if decision.writes else now
            if not theirs:
                assert now == 5 + number


def test_a_weight_that_cannot_be_read_or_is_too_large_is_not_written() -> None:
    assert decide_weight(None, KnownWeight(site=1), 1000).step is Step.UNKNOWN
    assert decide_weight((1 << 32) - 10, None, 1000).step is Step.LEAVE
