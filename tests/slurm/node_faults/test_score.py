"""How much a fault counts: it fades, is shared by those who had it at once, and does not add up within a moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc.core.errors import UsageError
from resilio_hpc.slurm.node_faults.fault import FORGOTTEN, NodeFault, decode, encode
from resilio_hpc.slurm.node_faults.policy import fault_policy
from resilio_hpc.slurm.node_faults.score import scores

POLICY = fault_policy()
NOW = 1_800_000_000.0
DAY = 86_400.0


def lost(node: str = "n1", ago: float = 0.0, **more: Any) -> NodeFault:
    return NodeFault(**{"time": NOW - ago, "node": node, "kind": "node-lost", "run": "r1", **more})


def score(*faults: NodeFault, now: float = NOW, cluster: str = "") -> dict[str, float]:
    return {one.node: one.score for one in scores(faults, now, POLICY, cluster)}


def test_a_fault_counts_half_after_a_half_life() -> None:
    assert score(lost()) == {"n1": 1.0}
    assert score(lost(ago=7 * DAY))["n1"] == pytest.approx(0.5)
    assert score(lost(ago=28 * DAY))["n1"] == pytest.approx(1 / 16)
    assert score(lost(), now=NOW + 70 * DAY)["n1"] < 0.001


def test_the_same_fault_written_down_twice_is_one() -> None:
    assert score(lost(), lost(), lost(evidence="in other words")) == {"n1": 1.0}


def test_repetitions_within_a_moment_are_one_and_one_run_counts_a_few_times_only() -> None:
    assert score(lost(ago=300), lost()) == pytest.approx({"n1": 1.0}, abs=0.01)
    each_hour = [lost(ago=3600.0 * hour) for hour in range(10)]
    assert score(*each_hour)["n1"] == pytest.approx(POLICY.most_per_run, abs=0.1)
    other_runs = [lost(ago=3600.0 * hour, run=f"r{hour}") for hour in range(3)]
    assert score(*other_runs)["n1"] == pytest.approx(3, abs=0.1)


def test_what_many_nodes_had_at_once_is_shared() -> None:
    many = [lost(f"n{number}", ago=number) for number in range(10)]
    assert max(score(*many).values()) == pytest.approx(0.1, abs=0.001)
    assert score(*many[:2]) == pytest.approx({"n0": 1.0, "n1": 1.0}, abs=0.001)  # two may both be bad
    assert score(*many, lost("n3", ago=DAY, run="r2"))["n3"] > 0.9  # its own fault of another day counts whole


def test_what_was_forgotten_counts_no_more_and_what_comes_later_does() -> None:
    mended = NodeFault(time=NOW - 100, node="n1", kind=FORGOTTEN, evidence="new board")
    assert score(lost(ago=200), mended) == {}
    assert score(lost(ago=5000), mended, lost("n2", ago=5000)) == pytest.approx({"n2": 1.0}, abs=0.01)
    assert score(lost(ago=5000), mended, lost(run="r2"))["n1"] == 1.0


def test_clusters_that_share_a_ledger_are_kept_apart() -> None:
    faults = [lost(cluster="alpha"), lost("n2", cluster="beta"), lost("n3")]
    assert set(score(*faults, cluster="alpha")) == {"n1", "n3"}
    assert set(score(*faults)) == {"n1", "n2", "n3"}


def test_a_kind_that_is_not_known_and_a_time_that_cannot_be_count_nothing() -> None:
    assert score(lost(kind="of-a-newer-version"), lost("n2", ago=-2 * DAY)) == {}
    assert score(lost(ago=-60)) == {"n1": 1.0}  # a clock that is a little ahead


def test_devices_of_a_node_are_told_apart() -> None:
    gpu = {"kind": "device-error", "device": "local rank 3"}
    (one,) = scores([lost(ago=DAY, **gpu), lost(kind="unkillable")], NOW, POLICY)
    assert one.devices == pytest.approx({"local rank 3": 0.9057, "": 0.4}, abs=0.001)
    assert one.summary == "score 1.31: unkillable 1, device-error 1"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1e8), st.sampled_from(sorted(POLICY.kinds)))))
def test_scores_only_fall_while_nothing_happens(seen: list[tuple[str, float, str]]) -> None:
    faults = [lost(node, ago, kind=kind) for node, ago, kind in seen]
    before, after = score(*faults), score(*faults, now=NOW + DAY)
    assert all(after.get(node, 0.0) <= value + 1e-9 for node, value in before.items())
    assert [one.score for one in scores(faults, NOW, POLICY)] == sorted(before.values(), reverse=True)


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{", b"[]", b'{"time":1}', b'{"time":1e300,"node":"n1","kind":"x"}', b'{"time":1,"node":"","kind":"x"}',
        b'{"time":1,"node":"n1 n2","kind":"x"}', b'{"time":1,"node":"../n1","kind":"x"}', b"\xff\xfe",
        b'{"time":"1","node":"n1","kind":"x"}', b'{"time":1,"node":"n1","kind":"x","evidence":"' + b"x" * 2000 + b'"}',
        b"[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_fault_is_none(line: bytes) -> None:
    assert decode(line) is None


def test_a_fault_comes_back_as_it_was_and_fields_of_a_newer_version_are_ignored() -> None:
    fault = lost(device="gpu 3", evidence="Xid 79", cluster="alpha", job="7")
    assert decode(encode(fault)) == fault
    assert decode(b'{"time":1,"node":"n1","kind":"x","colour":"red"}') == NodeFault(time=1, node="n1", kind="x")
    with pytest.raises(ValueError, match="not a fault that can be remembered"):
        encode(lost("n 1"))


def test_a_sites_values_stand_in_one_by_one(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text("half_life_days = 1.0\n[kinds.node-lost]\ncounts = 2.0\n")
    policy = fault_policy(own)
    assert (policy.half_life_s, policy.kinds["node-lost"].counts) == (DAY, 2.0)
    assert policy.kinds["node-lost"].once_per_s == POLICY.kinds["node-lost"].once_per_s
    assert policy.drain_at == POLICY.drain_at


@pytest.mark.parametrize(
    "text", ["half_life_days = 0", "colour = 1", "drain_at = 1.0\nundrain_below = 2.0", "exclude_share = 2.0", "= 1"]
)
def test_a_policy_that_cannot_be_is_refused(text: str, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(text)
    with pytest.raises(UsageError, match=r"own\.toml: not a policy"):
        fault_policy(own)


def test_every_kind_says_where_it_is_from() -> None:
    assert all(kind.source and kind.meaning and kind.counts > 0 for kind in POLICY.kinds.values())
