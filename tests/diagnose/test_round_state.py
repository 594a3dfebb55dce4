"""Whose failure a round is, message by message."""

from __future__ import annotations

import pytest

from resilio_hpc.diagnose.messages import Drop, Entered, Failed, Get, Given, Measured, Order, Put
from resilio_hpc.diagnose.observations import RoundOutcome
from resilio_hpc.diagnose.round_state import LAST_WORDS_S, MOST_VALUES, PairingRound


def pair() -> PairingRound:
    return PairingRound(1, [("a", "b")])


def measured(collective: tuple[float, ...] = (0.2,), delays: tuple[float, ...] = (0.0,)) -> Measured:
    return Measured(1, "cpu", (0.1,), collective, delays)


def outcomes(state: PairingRound) -> dict[str, tuple[RoundOutcome, str | None]]:
    return {seen.node: (seen.outcome, seen.fault) for seen in state.observations()}


def test_orders_name_the_partner_and_ranks() -> None:
    state = PairingRound(3, [("a", "b"), ("c",)])
    assert state.orders() == [("a", Order(3, "b", 0)), ("b", Order(3, "a", 1)), ("c", Order(3, "", 0))]


def test_both_pass() -> None:
    state = pair()
    assert state.heard("a", measured(), 0.0) == []
    assert not state.over
    state.heard("b", measured(), 0.0)
    assert state.over
    assert outcomes(state) == {"a": (RoundOutcome.PASSED, None), "b": (RoundOutcome.PASSED, None)}


def test_waiting_for_a_cpu_on_either_side_is_taken_off_and_a_block_of_mostly_that_is_left_out() -> None:
    state = pair()
    state.heard("a", measured((1.0, 1.0), (0.1, 0.0)), 0.0)
    state.heard("b", measured((1.0, 1.0), (0.1, 0.9)), 0.0)
    assert state.observations()[0].times.collective == pytest.approx((0.8,))


def test_addresses_go_to_the_other_half_when_they_are_there() -> None:
    state = pair()
    assert state.heard("b", Get(1, "0/0"), 0.0) == []
    assert state.heard("a", Put(1, "0/0", b"x"), 0.0) == [("b", Given(1, "0/0", b"x"))]
    assert state.heard("b", Get(1, "0/0"), 0.0) == [("b", Given(1, "0/0", b"x"))]
    assert state.heard("a", Get(1, "0/0"), 0.0) == []


def test_a_node_cannot_fill_the_memory() -> None:
    state = pair()
    for number in range(10 * MOST_VALUES):
        state.heard("a", Put(1, f"key{number}", b"x"), 0.0)
        state.heard("a", Get(1, f"other{number}"), 0.0)
    assert len(state._parts["a"].values) == len(state._parts["a"].wants) == MOST_VALUES


def test_who_fails_while_computing_fails_alone_and_the_partner_is_sent_home() -> None:
    state = pair()
    state.heard("b", Entered(1, "joining"), 0.0)
    assert state.heard("a", Failed(1, "computing", "crashed", "SIGSEGV"), 1.0) == [("b", Drop(1))]
    assert outcomes(state) == {"a": (RoundOutcome.ALONE, "crashed"), "b": (RoundOutcome.WAITED, None)}


def test_the_partner_of_one_that_failed_may_still_fail_by_itself() -> None:
    state = pair()
    state.heard("a", Failed(1, "computing", "crashed", ""), 1.0)
    assert not state.over
    state.heard("b", Failed(1, "computing", "wrong_result", ""), 2.0)
    assert outcomes(state) == {"a": (RoundOutcome.ALONE, "crashed"), "b": (RoundOutcome.ALONE, "wrong_result")}


def test_a_collective_that_fails_is_laid_to_both_after_a_moment_for_the_others_last_words() -> None:
    state = pair()
    for node in "ab":
        state.heard(node, Entered(1, "communicating"), 0.0)
    assert state.heard("a", Failed(1, "communicating", "failed", "connection reset"), 1.0) == []
    assert state.tick(1.0 + LAST_WORDS_S / 2) == []
    assert state.tick(1.0 + LAST_WORDS_S) == [("b", Drop(1))]
    assert outcomes(state) == {"a": (RoundOutcome.TOGETHER, "failed"), "b": (RoundOutcome.TOGETHER, "failed")}


def test_last_words_count() -> None:
    state = pair()
    for node in "ab":
        state.heard(node, Entered(1, "communicating"), 0.0)
    state.heard("a", Failed(1, "communicating", "failed", "connection reset"), 1.0)
    state.heard("b", Failed(1, "communicating", "crashed", "SIGBUS"), 1.5)
    assert outcomes(state) == {"a": (RoundOutcome.TOGETHER, "failed"), "b": (RoundOutcome.TOGETHER, "crashed")}


def test_who_does_not_come_back_where_the_partner_timed_out_hangs() -> None:
    state = pair()
    for node in "ab":
        state.heard(node, Entered(1, "communicating"), 0.0)
    state.heard("a", Failed(1, "communicating", "hung", "timed out"), 1.0)
    state.tick(1.0 + LAST_WORDS_S)
    assert outcomes(state)["b"] == (RoundOutcome.TOGETHER, "hung")


def test_a_node_that_goes_silent_in_the_collective_is_the_cause_of_its_partners_error() -> None:
    state = pair()
    for node in "ab":
        state.heard(node, Entered(1, "communicating"), 0.0)
    state.heard("b", Failed(1, "communicating", "failed", "connection reset"), 1.0)
    state.gone("a", "silent", "exit code 137", 2.0)
    assert outcomes(state) == {"a": (RoundOutcome.ALONE, "silent"), "b": (RoundOutcome.WAITED, None)}


def test_words_of_another_round_of_strangers_and_after_the_end_are_not_heard() -> None:
    state = pair()
    assert state.heard("a", Failed(2, "computing", "crashed", ""), 0.0) == []
    assert state.heard("z", measured(), 0.0) == []
    state.heard("a", measured(), 0.0)
    state.heard("a", Failed(1, "computing", "crashed", ""), 0.0)
    state.gone("a", "silent", "", 0.0)
    state.heard("b", measured(), 0.0)
    assert outcomes(state)["a"] == (RoundOutcome.PASSED, None)


def test_a_wrong_sum_that_one_side_saw_is_laid_to_both() -> None:
    state = pair()
    for node in "ab":
        state.heard(node, Entered(1, "communicating"), 0.0)
    state.heard("a", measured(), 0.0)
    state.heard("b", Failed(1, "communicating", "wrong_result", "wrong sum"), 1.0)
    assert outcomes(state) == {"a": (RoundOutcome.TOGETHER, "failed"), "b": (RoundOutcome.TOGETHER, "wrong_result")}


def test_one_by_itself_only_computes() -> None:
    state = PairingRound(1, [("c",)])
    state.heard("c", Measured(1, "cpu", (0.1,), ()), 0.0)
    assert outcomes(state) == {"c": (RoundOutcome.PASSED, None)}
