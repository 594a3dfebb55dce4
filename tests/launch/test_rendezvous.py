"""Who takes part in a round, and as which node rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc.launch.controller.rendezvous import AvailableNode, NodeCounts, by_switch, choose, whole_first


def nodes(*names: str, slots: int = 2) -> list[AvailableNode]:
    return [AvailableNode(name, order, f"{name}-ib", slots) for order, name in enumerate(names)]


def names(candidates: list[AvailableNode], previous: list[str], shape: NodeCounts, coming: int = 0) -> list[str]:
    return [member.node for member in choose(candidates, previous, shape, coming)]


@pytest.mark.parametrize(
    ("minimum", "maximum", "unit", "at_hand", "taken"),
    [
        (4, 4, 1, 4, 4),
        (4, 4, 1, 3, 0),
        (2, 4, 1, 3, 3),
        (2, 4, 1, 9, 4),
        (2, 8, 2, 5, 4),
        (2, 8, 4, 3, 0),
        (3, 8, 4, 7, 4),
    ],
)
def test_a_round_takes_a_multiple_of_the_unit_between_minimum_and_maximum(
    minimum: int, maximum: int, unit: int, at_hand: int, taken: int
) -> None:
    assert NodeCounts(minimum, maximum, unit).trim(at_hand) == taken


def test_ranks_are_numbered_through_the_nodes() -> None:
    members = choose(nodes("a", "b", "c"), [], NodeCounts(3, 3), 0)
    assert [(x.node, x.node_rank, x.first_rank, x.local_world_size) for x in members] == [
        ("a", 0, 0, 2), ("b", 1, 2, 2), ("c", 2, 4, 2),
    ]  # fmt: skip
    assert members[0].address == "a-ib"


def test_a_round_waits_only_for_nodes_that_would_make_it_larger() -> None:
    assert names(nodes("a", "b"), [], NodeCounts(2, 4), coming=1) == []
    assert names(nodes("a", "b"), [], NodeCounts(2, 2), coming=1) == ["a", "b"]
    assert names(nodes("a", "b"), [], NodeCounts(2, 4, 2), coming=1) == ["a", "b"]


def test_survivors_keep_their_ranks_and_a_spare_takes_the_vacant_one() -> None:
    assert names(nodes("b", "c", "d", "spare"), ["a", "b", "c", "d"], NodeCounts(4, 4)) == ["spare", "b", "c", "d"]
    assert names(nodes("c", "b"), ["b", "a", "c"], NodeCounts(2, 3)) == ["b", "c"]


def test_nodes_of_a_switch_stand_side_by_side_in_the_allocations_order() -> None:
    places = {"n1": "top.s2.n1", "n2": "top.s10.n2", "n10": "top.s2.n10", "n3": "top.s10.n3", "n4": ""}
    candidates = [AvailableNode(node, order, node, 1, place) for order, (node, place) in enumerate(places.items())]
    assert [c.node for c in by_switch(candidates)] == ["n1", "n10", "n2", "n3", "n4"]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=24))
def test_every_switch_is_one_stretch(places: list[tuple[int, int]]) -> None:
    candidates = [AvailableNode(f"n{i}", i, "", 1, f"a{top}.b{leaf}.n{i}") for i, (top, leaf) in enumerate(places)]
    for depth in (1, 2):
        switches = [c.topology.split(".")[:depth] for c in by_switch(candidates)]
        stretches = [switch for i, switch in enumerate(switches) if i == 0 or switches[i - 1] != switch]
        assert len(stretches) == len({tuple(switch) for switch in switches})


@given(
    st.sets(st.integers(0, 9)), st.permutations(range(10)), st.integers(1, 10), st.integers(1, 10), st.integers(1, 3)
)
def test_whatever_is_at_hand_members_are_distinct_and_as_many_as_allowed(
    at_hand: set[int], order: list[int], size: int, least: int, unit: int
) -> None:
    shape = NodeCounts(min(least, size), size, unit)
    previous = [f"n{number}" for number in order[:size]]
    candidates = [AvailableNode(f"n{number}", number, "", 1) for number in at_hand]
    chosen = names(candidates, previous, shape)
    assert len(chosen) == len(set(chosen)) == shape.trim(len(at_hand))
    assert set(chosen) <= {c.node for c in candidates}
    if len(chosen) == len(previous):
        assert all(chosen[rank] == node for rank, node in enumerate(previous) if node in {c.node for c in candidates})


def test_nodes_with_devices_out_of_use_wait_where_others_can_take_their_places() -> None:
    bad = [AvailableNode(name, order, name, 8 - evicted, "", evicted) for name, order, evicted in
           (("a", 0, 1), ("b", 1, 0), ("c", 2, 3), ("d", 3, 0))]  # fmt: skip
    assert [c.node for c in whole_first(bad, NodeCounts(3, 3))] == ["a", "b", "d"]  # the worst one first
    assert [c.node for c in whole_first(bad, NodeCounts(2, 2))] == ["b", "d"]
    assert [c.node for c in whole_first(bad, NodeCounts(4, 4))] == ["a", "b", "c", "d"]
    assert [c.node for c in whole_first(bad, NodeCounts(2, 4, 2))] == ["a", "b", "c", "d"]


@given(st.lists(st.integers(0, 2), max_size=12), st.integers(1, 12), st.integers(1, 12), st.integers(1, 3))
def test_to_prefer_whole_nodes_makes_no_round_smaller(evicted: list[int], size: int, least: int, unit: int) -> None:
    shape = NodeCounts(min(least, size), size, unit)
    candidates = [AvailableNode(f"n{at}", at, "", 8 - gone, "", gone) for at, gone in enumerate(evicted)]
    left = whole_first(candidates, shape)
    assert shape.trim(len(left)) == shape.trim(len(candidates))
    assert all(c in left for c in candidates if not c.evicted)
