"""Who takes part in a round, and as which node rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc.ckpt.format.own_copy import OwnCopy
from resilio_hpc.launch.controller.facts.rendezvous import (
    AvailableNode,
    NodeCounts,
    by_switch,
    choose,
    places_on_disk,
    whole_first,
)


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


# -- nodes whose own disks have the state of some ranks ----------------------------------------------------------------


def on_disks(**places: int) -> dict[str, tuple[OwnCopy, ...]]:
    """Disks with step 100 of a world of three nodes with two ranks each."""
    return {node: (OwnCopy(100, 2 * place, 2, 6), OwnCopy(90, 0, 2, 6)) for node, place in places.items()}


def placed(at_hand: list[AvailableNode], previous: list[str], disks: dict[str, tuple[OwnCopy, ...]]) -> list[str]:
    shape = NodeCounts(3, 3)
    members = choose(at_hand, previous, shape, 0, places_on_disk(at_hand, disks, 100, 3))
    assert [member.first_rank for member in members] == [0, 2, 4]
    return [member.node for member in members]


@pytest.mark.parametrize(
    ("at_hand", "previous", "disks", "members"),
    [
        # the next job: one node is another one, and the names' order would move all the others
        (("b", "c", "d"), (), {"b": 1, "c": 2}, ["d", "b", "c"]),
        # in another order than before
        (("c", "a", "b"), (), {"a": 0, "b": 1, "c": 2}, ["a", "b", "c"]),
        # a spare's disk has what a member's has not
        (("a", "x", "b", "c"), (), {"a": 0, "b": 1, "c": 2}, ["a", "b", "c"]),
        # two nodes are replaced: each place goes to the node that had it
        (("a", "s", "c", "b"), ("a", "x", "y"), {"a": 0, "b": 1, "c": 2}, ["a", "b", "c"]),
        # a node that stays keeps its place, whatever another one's disk has
        (("a", "x", "b", "c"), ("a", "x", "z"), {"b": 1, "c": 2}, ["a", "x", "c"]),
        # two disks have the same: the first in order
        (("c", "b", "a"), (), {"c": 1, "b": 1}, ["b", "c", "a"]),
        # the run grows again after it shrank without a commit meanwhile: what memory holds is of another world
        (("a", "c", "b"), ("a", "c"), {"a": 0, "b": 1, "c": 2}, ["a", "b", "c"]),
        (("b", "c", "d"), (), {}, ["b", "c", "d"]),
    ],
)
def test_a_node_comes_to_the_ranks_whose_state_its_own_disk_has(
    at_hand: tuple[str, ...], previous: tuple[str, ...], disks: dict[str, int], members: list[str]
) -> None:
    assert placed(nodes(*at_hand), list(previous), on_disks(**disks)) == members


@pytest.mark.parametrize(
    "copy",
    [OwnCopy(90, 4, 2, 6), OwnCopy(100, 4, 2, 8), OwnCopy(100, 4, 4, 6), OwnCopy(100, 1, 2, 6)],
    ids=["of another step", "of another world", "of more ranks", "between two nodes' ranks"],
)
def test_a_copy_that_no_place_restores_moves_no_node(copy: OwnCopy) -> None:
    assert placed(nodes("a", "b", "c"), [], {"a": (copy,)}) == ["a", "b", "c"]


def test_nodes_with_different_numbers_of_ranks_keep_their_order() -> None:
    at_hand = [*nodes("a", "b"), *nodes("c", slots=1)]
    assert places_on_disk(at_hand, on_disks(a=2, b=0, c=1), 100, 3) == {}


@given(st.permutations(range(6)), st.lists(st.integers(0, 3), min_size=6, max_size=6), st.sets(st.integers(0, 5)))
def test_no_assignment_lets_more_nodes_find_their_state(order: list[int], has: list[int], gone: set[int]) -> None:
    at_hand = [AvailableNode(f"n{number}", place, "", 2) for place, number in enumerate(order) if number not in gone]
    disks = {f"n{number}": place for number, place in enumerate(has) if place < 3}
    members = choose(at_hand, [], NodeCounts(1, 3), 0, disks)
    there = {disks[one.node] for one in at_hand if one.node in disks and disks[one.node] < len(members)}
    assert sum(disks.get(member.node) == member.node_rank for member in members) == len(there)
    assert len({member.node for member in members}) == len(members) == min(3, len(at_hand))
