"""The lines that a node's ledger gets of what its ranks log: few, whole, and of one rank."""

from __future__ import annotations

import math
from typing import Any

from resilio_hpc.core.rank_link import StepDone, StepsPlanned, ValuesLogged
from resilio_hpc.launch.workers.rank_records import RankRecords


def lines(records: RankRecords, *said: tuple[int, int, ValuesLogged]) -> list[dict[str, Any]]:
    return [fields for number, rank, message in said for _, fields in records.of(number, rank, message)]


def logged(at: float, tokens: float = 10.0, step: int = 1) -> ValuesLogged:
    return ValuesLogged(step, at, 1.0, {"loss": 2.0}, {"tokens": tokens}, ("grad",))


def test_two_seconds_apart_at_first_and_a_minute_later() -> None:
    found = lines(RankRecords(), *((0, 0, logged(1000.0 + second)) for second in range(20_000)))
    assert 300 < len(found) < 900
    assert sum(one["sums"]["tokens"] for one in found) >= 10 * (20_000 - 60)
    assert found[0]["seconds"] == 1.0 and found[1]["seconds"] == 2.0 and found[-1]["seconds"] == 60.0
    assert found[0]["not_finite"] == ["grad"]


def test_the_lowest_rank_counts_and_a_new_round_begins_again() -> None:
    records = RankRecords()
    found = lines(records, (0, 5, logged(1.0)), (0, 7, logged(2.0)), (0, 4, logged(3.0)), (0, 5, logged(9.0)),
                  (1, 5, logged(10.0)))  # fmt: skip
    assert [(one["round"], one["rank"]) for one in found] == [(0, 5), (0, 4), (1, 5)]


def test_a_clock_that_is_set_back_does_not_end_it() -> None:
    found = lines(RankRecords(), (0, 0, logged(5000.0)), (0, 0, logged(10.0)), (0, 0, logged(12.0)))
    assert len(found) == 3


def test_hostile_values_and_names() -> None:
    values = {f"\x1b[31m{number}": float(number) for number in range(100)} | {"nan": math.nan}
    message = ValuesLogged(1, 1.0, -5.0, values, {"t\n": math.inf}, ("\x07",) * 100)
    (one,) = lines(RankRecords(), (0, 0, message))
    assert len(one["values"]) == 8 and all(name.isprintable() for name in one["values"])
    assert one["sums"] == {} and one["seconds"] == 0.0 and one["not_finite"] == ["?"] * 8


def test_planned_steps() -> None:
    assert [*RankRecords().of(3, 0, StepsPlanned(5, 50))] == [("steps_planned", {"round": 3, "start": 5, "total": 50})]


def test_the_last_step_has_its_line_however_soon_and_once() -> None:
    last = ValuesLogged(9, 3.5, 0.5, {"loss": 1.0}, {"tokens": 5.0}, (), True)
    found = lines(RankRecords(), (0, 0, logged(3.0, step=8)), (0, 0, last), (0, 0, last))
    assert [(one["step"], one["sums"]["tokens"]) for one in found] == [(8, 10.0), (9, 5.0)]


def paced(records: RankRecords, *steps: tuple[int, int, float], rank: int = 0) -> list[dict[str, Any]]:
    said = ((number, StepDone(step, at)) for number, step, at in steps)
    return [fields for number, message in said for kind, fields in records.of(number, rank, message) if kind == "pace"]


def test_the_pace_is_the_median_of_the_steps_since_the_last_line() -> None:
    times = [0.5 * step + 5.0 * (step > 6) for step in range(1, 12)]  # one step takes 5.5 s
    found = paced(RankRecords(), *((0, step, at) for step, at in enumerate(times, 1)))
    assert [(one["step"], one["steps"], one["step_s"], one["slowest_s"]) for one in found] == [
        (5, 4, 0.5, 0.5), (7, 2, 3.0, 5.5), (11, 4, 0.5, 0.5),
    ]  # fmt: skip


def test_lines_of_the_pace_are_few_and_steps_that_were_not_told_are_counted() -> None:
    found = paced(RankRecords(), *((0, 10 * step, float(step)) for step in range(20_000)))
    assert 300 < len(found) < 900 and {one["step_s"] for one in found} == {0.1}
    assert sum(one["steps"] for one in found) >= 10 * (20_000 - 61)


def test_a_new_round_and_a_clock_that_is_set_back_begin_again() -> None:
    steps = [(0, 1, 100.0), (0, 2, 103.0), (1, 2, 200.0), (1, 3, 150.0), (1, 4, 153.0), (1, 4, 190.0)]
    assert [(one["round"], one["step_s"]) for one in paced(RankRecords(), *steps)] == [(0, 3.0), (1, 3.0)]


def test_one_rank_of_the_run_tells_the_pace() -> None:
    assert paced(RankRecords(), (0, 1, 0.0), (0, 2, 9.0), rank=1) == []
