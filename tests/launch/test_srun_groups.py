"""Which nodes share an srun."""

from __future__ import annotations

import pytest

from resilio_hpc.launch.allocation.srun_groups import absent_agents, group_nodes, parse_topology

TREE = """\
SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[1-20]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[21-26],gpu07
SwitchName=s2 Level=1 LinkSpeed=1 Nodes=n[1-26],gpu07 Switches=s[0-1]
"""
BLOCKS = "BlockName=b1 BlockIndex=0 Nodes=n[1-4] BlockSize=4\nBlockName=b2 BlockIndex=1 Nodes=n[5-8] BlockSize=4\n"


def names(first: int, last: int) -> tuple[str, ...]:
    return tuple(f"n{number}" for number in range(first, last + 1))


def test_only_leaf_switches_count() -> None:
    assert parse_topology(TREE) == [names(1, 20), (*names(21, 26), "gpu07")]
    assert parse_topology(BLOCKS) == [names(1, 4), names(5, 8)]
    assert parse_topology("No topology information available\n") == []
    assert parse_topology("SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[1-\n") == []


def test_neighbours_share_an_srun_where_nothing_is_known() -> None:
    groups = group_nodes(names(1, 1000))
    assert sum(groups, ()) == names(1, 1000)
    assert len(groups) == 63
    assert {len(group) for group in groups} <= {15, 16}


def test_a_large_switch_is_split_evenly_and_small_ones_share() -> None:
    assert [len(group) for group in group_nodes(names(1, 26), domains=parse_topology(TREE))] == [10, 16]
    eight_switches = [names(4 * k + 1, 4 * k + 4) for k in range(8)]
    assert group_nodes(names(1, 32), domains=eight_switches) == [names(1, 16), names(17, 32)]


def test_a_group_stays_within_its_switch_when_both_do_not_fit() -> None:
    nodes = tuple(f"n{number}" for number in (1, 13, 2, 14, 3, 15))  # allocations need not be in the switches' order
    assert group_nodes(nodes, domains=[names(1, 12), names(13, 24)], size=4) == [
        ("n1", "n2", "n3"), ("n13", "n14", "n15")
    ]  # fmt: skip


def test_nodes_with_different_numbers_of_cpus_share_no_srun() -> None:
    groups = group_nodes(names(1, 6), cpus=[8, 8, 8, 64, 64, 8], size=16)
    assert groups == [("n1", "n2", "n3", "n6"), ("n4", "n5")]


@pytest.mark.parametrize("size", [1, 2, 3, 16])
@pytest.mark.parametrize("count", [1, 2, 33, 100])
def test_every_node_is_in_exactly_one_group(count: int, size: int) -> None:
    groups = group_nodes(names(1, count), cpus=[8, 4] * count, domains=parse_topology(TREE), size=size)
    assert sorted(sum(groups, ())) == sorted(names(1, count))
    assert max(map(len, groups)) <= size
    assert groups[0][0] == "n1"


def test_which_agents_of_a_running_group_are_gone() -> None:
    group = ("n1", "n2", "n3")
    assert absent_agents(group, ["n1", "n2"], ["n2"], running_s=30.0) == ("n2",)
    assert absent_agents(group, ["n1", "n2"], ["n2"], running_s=90.0) == ("n2", "n3")
    assert absent_agents(group, ["n1", "n2", "n3"], [], running_s=1e6) == ()
    assert absent_agents(group, [], ["n1", "n2", "n3"], running_s=3.0) == ()  # of an earlier life
