"""All limits of a run: learned, set by the user, kept for the next controller of as many ranks, and bounded."""

from __future__ import annotations

from resilio_hpc.watch.learned_limit import Waits
from resilio_hpc.watch.limit_table import (
    FIRST_LIMIT_S,
    FIRST_SECTION_S,
    FIRST_STEP,
    MOST_SECTIONS,
    SECTION,
    STEP,
    LimitEntry,
    LimitTable,
)

EVALUATION = f"{SECTION}evaluation"


def learned(*waits_s: float) -> LimitTable:
    table = LimitTable()
    table.begin(4)
    for wait_s in waits_s:
        table.learn(STEP, wait_s, 10)
        table.learn(EVALUATION, 10 * wait_s)
    return table


def entries(table: LimitTable) -> dict[str, LimitEntry]:
    return {entry.name: entry for entry in table.entries()}


def kept(table: LimitTable) -> dict[str, Waits]:
    return {name: entry.waits for name, entry in entries(table).items()}


def test_where_each_limit_comes_from() -> None:
    found = entries(learned(1.0, 2.0))
    assert {name: (entry.limit_s, entry.source) for name, entry in found.items()} == {
        FIRST_STEP: (FIRST_LIMIT_S, "default"),
        STEP: (3.0, "learned"),
        "call": (FIRST_LIMIT_S, "not learned yet"),
        EVALUATION: (30.0, "learned"),
    }
    assert (found[STEP].floor_s, found[STEP].waits) == (2.0, Waits(2, 20, 2.0, 1.0))


def test_what_the_user_has_set_holds_until_it_is_taken_back() -> None:
    table = learned(1.0, 2.0)
    table.chosen = {STEP: 30.0, FIRST_STEP: 400.0, f"{SECTION}export": 50.0}
    assert (table.seconds(STEP), table.seconds("call")) == (30.0, 400.0)
    assert entries(table)[f"{SECTION}export"].source == "set"
    table.learn(STEP, 2.0)
    table.chosen = {}
    assert table.seconds(STEP) == 6.0


def test_a_run_that_is_restarted_sooner_waits_no_longer_for_a_step() -> None:
    table = learned(1.0, 2.0)
    table.at_most_s = 2.5
    found = entries(table)
    assert {name: (entry.limit_s, entry.source) for name, entry in found.items()} == {
        FIRST_STEP: (FIRST_LIMIT_S, "default"),
        STEP: (2.5, "option"),
        "call": (2.5, "option"),
        EVALUATION: (30.0, "learned"),
    }
    table.chosen = {STEP: 30.0}
    assert table.seconds(STEP) == 30.0


def test_what_an_earlier_controller_learned_holds_for_as_many_ranks() -> None:
    before = learned(1.0, 2.0)
    for ranks, step_s, evaluation_s in ((4, 3.0, 30.0), (6, FIRST_LIMIT_S, FIRST_SECTION_S)):
        table = LimitTable()
        table.take_up(4, kept(before))
        table.begin(ranks)
        assert (table.seconds(STEP), table.seconds(EVALUATION)) == (step_s, evaluation_s)


def test_another_number_of_ranks_is_learned_from_the_start() -> None:
    table = learned(1.0, 2.0)
    table.take_up(4, kept(table))
    table.begin(6)
    table.begin(4)  # what was kept is used once
    assert table.seconds(STEP) == FIRST_LIMIT_S


def test_one_limit_is_learned_again() -> None:
    table = learned(1.0, 2.0)
    table.forget(STEP)
    assert (table.seconds(STEP), table.seconds(EVALUATION)) == (FIRST_LIMIT_S, 30.0)


def test_endless_names_take_no_endless_room() -> None:
    table = learned(1.0, 2.0)
    for number in range(5 * MOST_SECTIONS):
        table.learn(f"{SECTION}{number}", 1.0)
        assert len(table.entries()) <= MOST_SECTIONS + 2
    assert table.seconds(STEP) == 3.0
