"""Who holds up a hang: single communicators, walks across several, and simulated programs with one rank that stops."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilio_hpc.diagnose.hangs.blame import HangKind, blame
from resilio_hpc.diagnose.hangs.calls import CollectiveCall, RankCalls


def made(**calls: str) -> list[CollectiveCall]:
    """Calls from letters: a capital is a completed call."""
    return [
        CollectiveCall(number, letter.lower(), completed=letter.isupper())
        for number, letter in enumerate(calls["of"], 1)
    ]


def rank(number: int, **communicators: str) -> RankCalls:
    return RankCalls(number, {name: made(of=letters) for name, letters in communicators.items()})


def test_a_rank_that_did_not_enter() -> None:
    found = blame([rank(0, world="AAa"), rank(1, world="AA"), rank(2, world="AAa")], {"world": [0, 1, 2]})
    assert (found.kind, found.ranks, found.waiting) == (HangKind.ABSENT, (1,), (0, 2))
    assert found.evidence == "rank 1 did not enter a number 3 of world"


def test_a_rank_of_which_nothing_is_known() -> None:
    found = blame([rank(0, world="Aa"), rank(2, world="Aa")], {"world": [0, 1, 2]})
    assert (found.kind, found.ranks) == (HangKind.ABSENT, (1,))
    assert "nothing is known of rank 1" in found.evidence


def test_the_walk_ends_at_the_rank_that_waits_for_no_other() -> None:
    ranks = [rank(0, world="a"), rank(1, world="", pair="b"), rank(2, world="a", pair="")]
    assert blame(ranks, {"world": [0, 1, 2], "pair": [1, 2]}).kind is HangKind.DEADLOCK  # 2 waits for 1, 1 for 2
    chain = [rank(0, world="a"), rank(1, world="", pair="b"), rank(2, world="a"), rank(3, pair="")]
    found = blame(chain, {"world": [0, 1, 2], "pair": [1, 3]})
    assert (found.kind, found.ranks, found.communicator) == (HangKind.ABSENT, (3,), "pair")


def test_a_deadlock_of_two_communicators() -> None:
    found = blame([rank(0, a="x", b=""), rank(1, a="", b="x")], {"a": [0, 1], "b": [0, 1]})
    assert (found.kind, found.ranks) == (HangKind.DEADLOCK, (0, 1))
    assert found.evidence == "they wait in a circle: rank 0 in a for rank 1, rank 1 in b for rank 0"


@pytest.mark.parametrize(("letters", "odd"), [(["ab", "ab", "ac"], (2,)), (["ab", "ac"], (0, 1))])
def test_calls_that_do_not_agree(letters: list[str], odd: tuple[int, ...]) -> None:
    ranks = [rank(number, world=text) for number, text in enumerate(letters)]
    found = blame(ranks, {"world": range(len(letters))})
    assert (found.kind, found.ranks) == (HangKind.MISMATCH, odd)


def test_sizes_that_do_not_agree() -> None:
    ranks = [
        RankCalls(n, {"w": [CollectiveCall(1, "all_reduce", f"Float {size}")]}) for n, size in enumerate((8, 8, 16))
    ]
    found = blame(ranks, {"w": [0, 1, 2]})
    assert (found.kind, found.ranks) == (HangKind.MISMATCH, (2,))
    assert "all_reduce Float 16 on rank 2" in found.evidence


def test_a_rank_that_waits_for_one_of_which_nothing_is_known_is_not_to_blame() -> None:
    ranks = [rank(0, world="A", pair="a"), rank(2, world="Aa")]
    assert blame(ranks, {"world": [0, 1, 2], "pair": [0]}).ranks == (1,)


def test_all_are_inside_or_some_are_through() -> None:
    stuck = blame([rank(0, world="Aa"), rank(1, world="Aa")], {"world": [0, 1]})
    assert (stuck.kind, stuck.ranks, stuck.waiting) == (HangKind.STUCK, (), (0, 1))
    lagging = blame([rank(0, world="AA"), rank(1, world="Aa")], {"world": [0, 1]})
    assert (lagging.kind, lagging.ranks) == (HangKind.LAGGING, (1,))
    assert blame([rank(0, world="AA"), rank(1, world="AA")], {"world": [0, 1]}).kind is HangKind.NONE
    assert blame([], {}).kind is HangKind.NONE


def test_a_receive_waits_for_its_sender() -> None:
    receive = RankCalls(1, {"pp": [CollectiveCall(1, "recv", peer=0)]})
    idle = RankCalls(0, {"pp": []})
    assert blame([idle, receive], {"pp": [0, 1]}).ranks == (0,)
    before = CollectiveCall(1, "send", peer=1, completed=True)
    again = RankCalls(1, {"pp": [CollectiveCall(1, "recv", peer=0, completed=True), CollectiveCall(2, "recv", peer=0)]})
    assert blame([RankCalls(0, {"pp": [before]}), again], {"pp": [0, 1]}).ranks == (0,)
    send = RankCalls(0, {"pp": [CollectiveCall(1, "send", peer=1)]})
    assert blame([send, receive], {"pp": [0, 1]}).kind is HangKind.STUCK


def ran(programs: list[list[str]], members: dict[str, list[int]], stops: int, after: int) -> list[RankCalls]:
    """Run programs, which are lists of communicators to call, until no rank can go on; one stops before a call."""
    position = [0] * len(programs)
    while True:
        moved = False
        for communicator, ranks in members.items():
            there = [
                position[one] < len(programs[one]) and programs[one][position[one]] == communicator
                and not (one == stops and position[one] >= after)
                for one in ranks
            ]  # fmt: skip
            if all(there):
                moved = True
                for one in ranks:
                    position[one] += 1
        if not moved:
            break
    found = []
    for one, program in enumerate(programs):
        calls: dict[str, list[CollectiveCall]] = {}
        inside = one != stops or position[one] < after
        for step, communicator in enumerate(program[: position[one] + inside]):
            into = calls.setdefault(communicator, [])
            into.append(CollectiveCall(len(into) + 1, "all_reduce", "Float 8", completed=step < position[one]))
        found.append(RankCalls(one, calls))
    return found


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_rank_that_stops_is_blamed_whatever_the_program(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 8))
    everyone = list(range(count))
    groups = data.draw(st.lists(st.lists(st.sampled_from(everyone), min_size=2, unique=True), max_size=4))
    members = {"world": everyone, **{f"g{number}": sorted(group) for number, group in enumerate(groups)}}
    order = data.draw(st.lists(st.sampled_from(sorted(members)), min_size=1, max_size=8))
    programs = [[name for name in [*order, "world"] if one in members[name]] for one in everyone]
    stops = data.draw(st.sampled_from(everyone))
    after = data.draw(st.integers(0, len(programs[stops]) - 1))
    ranks = ran(programs, members, stops, after)
    found = blame(ranks, members)
    assert (found.kind, found.ranks) == (HangKind.ABSENT, (stops,))
    silent = [one for one in ranks if one.rank != stops]  # a process that is stopped writes no dump
    assert blame(silent, members).ranks == (stops,)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 6), st.integers(0, 5))
def test_a_program_that_ends_has_no_hang(count: int, calls: int) -> None:
    members = {"world": list(range(count))}
    ranks = ran([["world"] * calls] * count, members, stops=-1, after=0)
    finished = [
        RankCalls(one.rank, {name: [c for c in found if c.completed] for name, found in one.calls.items()})
        for one in ranks
    ]
    assert blame(finished, members).kind is HangKind.NONE
