"""Who has a quorum: tables, and the property that makes it one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc.launch.protocol.membership import (
    NEVER,
    Membership,
    first_membership,
    has_quorum,
    has_tie,
    next_membership,
    quorum_since,
    settled,
    silence_of_quorum,
    witnesses_needed,
)
from resilio_hpc.launch.protocol.node_list import NodeEntry, NodeList


def voters(*names: str) -> NodeList:
    return NodeList.of([NodeEntry(name, name, 4000) for name in names])


def joint(before: str, after: str) -> Membership:
    return next_membership(Membership(1, 1, voters(*before)), 1, voters(*after), settled=True)


@pytest.mark.parametrize(
    ("names", "supporters", "quorum", "tie"),
    [
        ("a", "a", True, False),
        ("ab", "a", False, True),
        ("ab", "ab", True, False),
        ("abc", "ab", True, False),
        ("abc", "a", False, False),
        ("abcd", "ab", False, True),
        ("abcd", "abc", True, False),
        ("abcd", "a", False, False),
        ("abcd", "axyz", False, False),  # others have no vote
        ("", "a", False, False),  # a joiner that has no vote
    ],
)
def test_more_than_half_is_a_quorum_and_exactly_half_is_a_tie(
    names: str, supporters: str, quorum: bool, tie: bool
) -> None:
    membership = first_membership(tuple(names))
    assert (has_quorum(membership, supporters), has_tie(membership, supporters)) == (quorum, tie)


def test_the_witness_helps_only_the_groups_for_which_it_was_claimed() -> None:
    membership = joint("abcd", "ab")
    assert not has_quorum(membership, "ab")
    assert has_quorum(membership, "ab", [tuple("abcd")])
    assert not has_quorum(membership, "a", [tuple("abcd")])
    assert not has_quorum(joint("ab", "cd"), "ac", [tuple("ab")])


def test_a_joint_membership_needs_old_and_new_voters_until_it_is_settled() -> None:
    membership = joint("abc", "cde")
    assert not has_quorum(membership, "ab")
    assert not has_quorum(membership, "de")
    assert has_quorum(membership, "bcd")
    assert has_quorum(settled(membership), "de")
    assert settled(membership).version > membership.version


def test_an_unsettled_membership_hands_all_its_groups_on() -> None:
    following = next_membership(joint("abc", "cde"), 2, voters("c"), settled=False)
    assert [sorted(group) for group in following.groups] == [["c"], ["c", "d", "e"], ["a", "b", "c"]]
    assert following.version == (2, 1)


def test_the_same_voters_in_another_order_need_no_joint_membership() -> None:
    assert joint("abc", "bca").before == ()


def test_voters_keep_their_witness_and_other_voters_get_one_of_their_own() -> None:
    first = first_membership("abcd")
    again = next_membership(first, 3, voters(*"dcba"), settled=False)
    half = next_membership(again, 3, voters(*"ab"), settled=True)
    back = next_membership(half, 5, voters(*"abcd"), settled=False)
    later = next_membership(settled(half), 5, voters(*"abcd"), settled=True)
    assert (first.witness, again.witness, half.witness, half.before[0].witness) == ("0.0", "0.0", "3.2", "0.0")
    assert (settled(half).witness, back.witness, back.before[0].witness) == ("3.2", "0.0", "3.2")
    assert (later.witness, later.before[0].witness) == ("5.1", "3.2")


def test_every_group_that_is_halved_needs_its_witness_the_oldest_first() -> None:
    membership = joint("abcd", "ab")
    assert witnesses_needed(membership, "ac") == ("0.0", "1.2")
    assert witnesses_needed(membership, "ab") == ("0.0",)
    assert witnesses_needed(membership, "abc") == ()
    assert witnesses_needed(membership, "a") == ()


groups = st.sets(st.sampled_from("abcdef"), min_size=1)


@given(groups, groups, groups)
def test_two_quorums_of_neighbouring_memberships_share_a_voter(
    before: set[str], after: set[str], side: set[str]
) -> None:
    other = (before | after) - side
    membership = joint("".join(sorted(before)), "".join(sorted(after)))
    old, new = first_membership(sorted(before)), settled(membership)
    for one, another in itertools.product((old, membership), (membership, new)):
        if (one, another) != (old, new):
            assert not (has_quorum(one, side) and has_quorum(another, other))


@given(groups, groups, groups, st.booleans())
def test_two_halves_that_know_neighbouring_memberships_need_one_and_the_same_witness(
    before: set[str], after: set[str], side: set[str], same: bool
) -> None:
    """One that the agents of one half have not heard of, because it was cut off just then, is their neighbour."""
    old = first_membership(sorted(before))
    new = next_membership(old, 2, voters(*sorted(before if same else after)), settled=False)
    other = (before | after) - side
    for one, another in itertools.product((old, new), repeat=2):
        mine, theirs = witnesses_needed(one, side), witnesses_needed(another, other)
        if (mine or has_quorum(one, side)) and (theirs or has_quorum(another, other)):
            assert set(mine) & set(theirs)


def test_a_quorum_is_as_old_as_the_oldest_support_that_it_needs() -> None:
    times = {"a": 10.0, "b": 7.0, "c": 3.0}
    assert quorum_since(first_membership("abc"), lambda node: times[node]) == 7.0
    assert quorum_since(first_membership("abcd"), lambda node: times.get(node, NEVER)) == 3.0
    assert quorum_since(first_membership("abcde"), lambda node: times.get(node, NEVER)) == 3.0
    assert quorum_since(first_membership("abcdef"), lambda node: times.get(node, NEVER)) == NEVER
    assert quorum_since(joint("abc", "c"), lambda node: times[node]) == 3.0


def test_a_former_controller_lost_its_quorum_when_the_most_silent_voters_that_make_one_lost_it() -> None:
    assert silence_of_quorum(first_membership("abc"), {"a": 5.0, "b": 4.0, "c": 0.1}, False) == 4.0
    assert silence_of_quorum(first_membership("abc"), {"a": 5.0}, False) == 0.0
    assert silence_of_quorum(first_membership("ab"), {"a": 5.0}, True) == 5.0


def test_an_endpoint_is_known_once_the_voter_has_come() -> None:
    membership = Membership(1, 1, NodeList.of([NodeEntry("a", "127.0.0.1", 81), NodeEntry("b", "b", 0)]))
    assert [membership.endpoint(node) for node in "abc"] == ["127.0.0.1:81", "", ""]
