"""Bad nodes are avoided, the worst first, and never so many that the job could not start."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc.slurm.client.gres import Gres
from resilio_hpc.slurm.client.model import Node
from resilio_hpc.slurm.client.states import node_state
from resilio_hpc.slurm.node_faults.exclusion import alike, choose, that_have
from resilio_hpc.slurm.node_faults.policy import fault_policy
from resilio_hpc.slurm.node_faults.score import NodeScore

POLICY = fault_policy()


def node(name: str, *state: str, **more: object) -> Node:
    return Node(**{"name": name, "state": node_state(state or ("IDLE",)), "partitions": ("main",), **more})  # type: ignore[arg-type]


def bad(*names: str, score: float = 1.0) -> list[NodeScore]:
    return [NodeScore(name, score - 0.01 * place, ()) for place, name in enumerate(names)]


def pool(count: int) -> list[Node]:
    return [node(f"n{number}") for number in range(1, count + 1)]


@pytest.mark.parametrize(
    ("nodes", "needed", "names", "expected"),
    [
        (5, 2, ["n1"], ["n1"]),
        (5, 5, ["n1"], []),  # all are needed
        (5, 2, ["n1", "n2", "n3"], ["n1"]),  # one, since a tenth of five is none
        (40, 2, ["n1", "n2", "n3", "n4", "n5", "n6"], ["n1", "n2", "n3", "n4"]),
        (40, 38, ["n1", "n2", "n3", "n4"], ["n1", "n2"]),
        (5, 2, ["elsewhere"], []),
        (0, 1, ["n1"], []),
    ],
)
def test_the_worst_are_avoided_as_far_as_enough_are_left(
    nodes: int, needed: int, names: list[str], expected: list[str]
) -> None:
    chosen = choose(bad(*names), pool(nodes), needed, POLICY)
    assert list(chosen.nodes) == expected
    assert set(chosen.spared) == {name for name in names if name != "elsewhere" and nodes} - set(expected)
    assert all(name in chosen.why for name in expected)


def test_who_has_too_small_a_score_is_not_avoided() -> None:
    assert choose(bad("n1", score=POLICY.exclude_at - 0.01), pool(9), 1, POLICY).nodes == ()


@pytest.mark.parametrize("states", [["IDLE*"] * 4, ["IDLE", "IDLE", "IDLE", "DOWN"]], ids=["slurmctld began", "boots"])
def test_a_node_that_is_out_of_service_now_and_will_be_needed_is_not_avoided(states: list[str]) -> None:
    nodes = [node(f"n{number}", *one.split()) for number, one in enumerate(states, 1)]
    nodes = [
        node(one.name, "IDLE", "NOT_RESPONDING") if state == "IDLE*" else one
        for one, state in zip(nodes, states, strict=True)
    ]
    assert choose(bad("n4"), nodes, 4, POLICY).nodes == ()
    assert choose(bad("n4"), [*nodes, *(node(f"m{number}") for number in range(4))], 4, POLICY).nodes == ("n4",)


def test_what_is_out_of_service_leaves_no_room() -> None:
    down = [node("n3", "DOWN"), node("n4", "IDLE", "DRAIN"), node("n5", "SPARKLING")]
    nodes = [node("n1"), node("n2"), *down]
    assert choose(bad("n1"), nodes, 2, POLICY).nodes == ()
    assert "5 nodes that would do, 2 in service, 2 are needed" in choose(bad("n1"), nodes, 2, POLICY).why
    assert choose(bad("n3"), nodes, 2, POLICY).nodes == ("n3",)  # it may be back by then


@pytest.mark.parametrize("flag", ["MAINT", "RESERVED", "NOT_RESPONDING"])
def test_what_is_kept_from_this_job_leaves_no_room_either(flag: str) -> None:
    nodes = [node("n1"), node("n2"), node("n3", "IDLE", flag)]
    assert choose(bad("n1"), nodes, 2, POLICY).nodes == ()
    assert choose(bad("n1"), [*nodes, node("n4")], 2, POLICY).nodes == ("n1",)


def test_each_partition_keeps_enough_since_a_job_gets_its_nodes_from_one() -> None:
    nodes = [node(f"a{n}", partitions=("a",)) for n in range(4)] + [node(f"b{n}", partitions=("b",)) for n in range(2)]
    assert choose(bad("b0"), nodes, 2, POLICY, partitions=["a", "b"]).nodes == ()
    assert choose(bad("b0"), nodes, 1, POLICY, partitions=["a", "b"]).nodes == ("b0",)
    assert choose(bad("b0", "a0"), nodes, 2, POLICY, partitions=["a", "b"]).nodes == ("a0",)


def test_the_users_own_list_is_theirs() -> None:
    chosen = choose(bad("n1", "n2"), pool(5), 3, POLICY, by_hand=["n1"])
    assert chosen.nodes == ("n2",)
    assert choose(bad("n2"), pool(5), 4, POLICY, by_hand=["n1"]).nodes == ()


@given(st.integers(0, 60), st.integers(0, 60), st.sets(st.integers(1, 60)), st.sets(st.integers(1, 60)))
def test_there_are_always_enough_left(total: int, needed: int, faulty: set[int], down: set[int]) -> None:
    nodes = [node(f"n{n}", *(["DOWN"] if n in down else ["IDLE"])) for n in range(1, total + 1)]
    chosen = choose(bad(*(f"n{n}" for n in sorted(faulty))), nodes, needed, POLICY)
    left = [one for one in nodes if one.state.in_service and one.name not in chosen.nodes]
    before = [one for one in nodes if one.state.in_service]
    assert len(left) >= min(needed, len(before))
    assert len(chosen.nodes) <= max(POLICY.exclude_at_least, total // 10)


def test_nodes_of_the_same_make_would_do() -> None:
    big = {"cpus": 64, "memory_mb": 1000, "gres": (Gres("gpu", "h100", 8),), "features": ("ib",)}
    nodes = [
        node("n1", **big), node("n2", **big), node("n3", **{**big, "memory_mb": 2000}),
        node("n4", **{**big, "partitions": ("other",)}), node("n5", **{**big, "gres": (Gres("gpu", "a100", 8),)}),
    ]  # fmt: skip
    assert [one.name for one in alike(nodes, ["n1"], ["main"])] == ["n1", "n2"]
    assert [one.name for one in alike(nodes, ["n1", "n3"], ["main", "other"])] == ["n1", "n2", "n3", "n4"]
    assert alike(nodes, ["gone"], ["main"]) == ()


def test_what_a_job_asks_for_is_compared_where_it_can_be() -> None:
    nodes = [
        node("n1", features=("a", "b"), gres=(Gres("gpu", "h100", 8),)),
        node("n2", features=("a",), gres=(Gres("gpu", "h100", 4),)),
        node("n3"),
    ]

    def names(*args: object) -> list[str] | None:
        found = that_have(nodes, ["main"], *args)  # type: ignore[arg-type]
        return None if found is None else [one.name for one in found]

    assert names() == ["n1", "n2", "n3"]
    assert names("a&b") == ["n1"]
    assert names("", Gres("gpu", "", 4)) == ["n1", "n2"]
    assert names("", Gres("gpu", "h100", 8)) == ["n1"]
    assert names("[a|b]") is None
    assert names("a*2") is None
