"""Who is paired and who is named, for all sets of bad nodes of small clusters and many of larger ones."""

from __future__ import annotations

import random
from itertools import combinations, product

import pytest

from resilio_hpc.diagnose.observations import RoundOutcome
from tests.support.diagnose.fake_nodes import POLICY, FakeNodes


def names(count: int) -> list[str]:
    return [f"n{number}" for number in range(count)]


@pytest.mark.parametrize("count", range(3, 9))
def test_every_minority_of_bad_nodes_is_named_and_nobody_else(count: int) -> None:
    nodes = names(count)
    for number in range((count + 1) // 2):
        for bad in combinations(nodes, number):
            for kinds in product((True, False), repeat=number):
                alone = {node for node, by_itself in zip(bad, kinds, strict=True) if by_itself}
                result = FakeNodes(nodes, alone, set(bad) - alone).check()
                assert result.bad == tuple(bad), (bad, kinds)
                assert result.slow == ()
                assert result.outcome == ("found" if bad else "fine")


@pytest.mark.parametrize("count", range(1, 7))
def test_a_healthy_node_is_never_named_however_many_are_bad(count: int) -> None:
    nodes = names(count)
    for number in range(count + 1):
        for bad in combinations(nodes, number):
            for kinds in product((True, False), repeat=number):
                alone = {node for node, by_itself in zip(bad, kinds, strict=True) if by_itself}
                result = FakeNodes(nodes, alone, set(bad) - alone).check()
                assert set(result.bad) <= set(bad)
                if len(bad) > count / 2:
                    assert set(result.bad) <= alone
                if len(alone) > count / 2:
                    assert result.bad == ()
                    assert result.outcome == "cannot_tell"
                    assert result.why


@pytest.mark.parametrize("count", [16, 17, 64, 65, 500, 2000])
def test_two_or_three_rounds_name_up_to_a_quarter_of_the_nodes(count: int) -> None:
    draw = random.Random(count)
    nodes = names(count)
    for _ in range(50 if count < 100 else 2):
        bad = set(draw.sample(nodes, draw.randint(1, (count - 2) // 4)))
        alone = {node for node in bad if draw.random() < 0.5}
        play = FakeNodes(nodes, alone, bad - alone)
        assert set(play.check().bad) == bad
        met_late = count % 2 or any(seen.outcome is RoundOutcome.WAITED for seen in play.history[0])
        assert len(play.history) <= (3 if met_late else 2)


def test_a_healthy_cluster_takes_one_round_and_an_odd_one_a_pair_more() -> None:
    even, odd = FakeNodes(names(10)), FakeNodes(names(11))
    assert even.check().rounds == 1
    assert odd.check().rounds == 2
    assert [len(done) for done in odd.history] == [11, 2]


def test_only_those_in_doubt_and_their_testers_are_in_the_second_round() -> None:
    play = FakeNodes(names(100), together={"n7"})
    assert play.check().bad == ("n7",)
    assert {seen.node for seen in play.history[1]} == {"n6", "n7", "n5", "n8"}


def test_rounds_are_bounded_and_who_was_not_reached_is_not_named() -> None:
    nodes = names(41)
    bad = set(nodes[0:40:2])  # one in each pair, and a single good pair in the ring
    play = FakeNodes(nodes, together=bad)
    result = play.check()
    assert len(play.history) == POLICY.rounds
    assert set(result.bad) <= bad
    assert result.outcome in ("found", "cannot_tell")


def test_two_nodes_that_fail_together_are_not_told_apart() -> None:
    result = FakeNodes(names(2), together={"n0"}).check()
    assert (result.outcome, result.bad) == ("cannot_tell", ())
    assert "two nodes" in result.why
    assert result.named("unsure") == ("n0", "n1")


def test_of_two_nodes_the_one_that_fails_by_itself_is_named() -> None:
    result = FakeNodes(names(2), alone={"n1"}).check()
    assert (result.outcome, result.bad, result.named("unsure")) == ("found", ("n1",), ("n0",))


def test_one_node_can_only_compute() -> None:
    result = FakeNodes(names(1)).check()
    assert result.outcome == "cannot_tell"
    assert "one node" in result.why


def test_a_link_that_fails_once_names_nobody() -> None:
    """n0 and n1 cannot talk to each other, and to everybody else they can."""

    class OneLink(FakeNodes):
        def play(self, pair):  # type: ignore[no-untyped-def]
            self.together = set(pair) if set(pair) == {"n0", "n1"} else set()
            return super().play(pair)

    result = OneLink(names(6)).check()
    assert result.bad == ()
    assert result.outcome == "fine"
    assert "then it passed" in result.nodes[0].evidence
