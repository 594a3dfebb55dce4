"""Step times of a ledger as measurements: steady steps alone, for each size and layout."""

from __future__ import annotations

from typing import Any

import pytest

from resilio_hpc.core.ledger import Event
from resilio_hpc.report.step_times import paces, weighted_median


def event(at: float, kind: str, /, **fields: Any) -> Event:
    return Event(at, "7-n1", kind, fields)


def launch(at: float = 0, **fields: Any) -> Event:
    return event(at, "launch", job="7", nodes=["n1", "n2"], **fields)


def begun(at: float, number: int = 0, nodes: int = 2) -> list[Event]:
    members = [f"n{node}" for node in range(nodes)]
    return [
        event(at, "round", round=number, members=members, world_size=8 * nodes),
        event(at + 1, "first_step", round=number, step=1, restored=-1),
    ]


def steps(at: float, *seconds: float, number: int = 0) -> list[Event]:
    """A line of ten steps each, one after the other, from ``at`` on."""
    found, step = [], 1
    for one in seconds:
        at, step = at + 10 * one, step + 10
        found.append(event(at, "pace", round=number, step=step, steps=10, step_s=one, slowest_s=one))
    return found


END = event(1000, "launch_ends", verdict="completed")


def test_the_first_line_is_warm_up_and_the_rest_has_a_median() -> None:
    (one,) = paces([launch(), *begun(1), *steps(2, 5.0, 2.0, 2.1, 1.9, 2.0, 9.0), END])
    assert (one.nodes, one.ranks, one.steps, one.disturbed) == (2, 16, 50, 0)
    assert one.step_s == 2.0 and one.spread < 0.06


def test_a_run_with_one_line_has_that_one() -> None:
    (one,) = paces([launch(), *begun(1), *steps(2, 5.0)])
    assert (one.step_s, one.steps) == (5.0, 10)


@pytest.mark.parametrize(
    "disturbance",
    [
        [event(33, "stalled", round=0, step=21, silent_s=0.5), event(48, "goes_on", round=0, step=22, waited_s=20.0)],
        [event(40, "slow", round=0, ranks=[3], nodes=["n1"], since=33.0), event(49, "slow_over", round=0)],
        [event(33, "paused", round=0, step=21), event(48, "pause_ended", round=0, step=21)],
        [event(33, "test_begun", round=0, nodes=2), event(48, "tested", round=0, outcome="fine")],
    ],
    ids=["stall", "slow rank", "pause", "test"],
)
def test_disturbed_steps_are_left_out(disturbance: list[Event]) -> None:
    lines = [launch(), *begun(1), *steps(2, 1.0, 1.0, 1.0, 1.7, 1.0, 1.0), *disturbance, END]
    (one,) = paces(sorted(lines, key=lambda line: line.time))
    assert (one.step_s, one.disturbed) == (1.0, 10) and one.steps == 40


def test_a_rank_that_was_slow_from_the_beginning_leaves_nothing() -> None:
    slow = event(30, "slow", round=0, ranks=[3], nodes=["n1"], since=0.0, since_start=True)
    (one,) = paces(sorted([launch(), *begun(1), *steps(2, 1.0, 1.0, 1.0), slow], key=lambda line: line.time))
    assert (one.step_s, one.steps, one.disturbed) == (0.0, 0, 30)


def test_each_size_and_layout_is_a_measurement_of_its_own() -> None:
    planned = {"tp": 2, "pp": 1, "dp": 4, "micro_batch": 1, "gpu": "h100", "planned": {"zero": "1"}}
    lines = [
        launch(layout={"tp": "4", "micro_batch": "2"}, layouts=["tp=4"]), *begun(1), *steps(2, 3.0, 1.0, 1.0),
        *begun(100, 1, nodes=1), event(100.5, "layout", round=1, ranks=8, why="one node", **planned),
        *steps(102, 3.0, 2.0, 2.0, number=1), *begun(200, 2, nodes=1), *steps(202, 4.0, 2.0, number=2), END,
    ]  # fmt: skip
    two, one = paces(sorted(lines, key=lambda line: line.time))
    assert (two.ranks, two.layout["tp"], two.layouts, two.step_s) == (16, "4", ("tp=4",), 1.0)
    assert (one.ranks, one.step_s, one.steps) == (8, 2.0, 30)
    assert one.layout == {"tp": "2", "pp": "1", "dp": "4", "micro_batch": "1", "gpu": "h100", "zero": "1"}


def test_hostile_lines_say_nothing() -> None:
    wild = [
        event(3, "pace", round=0, step="x", steps=-3, step_s=1.0), event(4, "pace", steps=5, step_s=float("nan")),
        event(5, "round", members="n1", world_size=-8), event(6, "pace", steps=5, step_s=1.0),
    ]  # fmt: skip
    assert all(one.step_s == 0 for one in paces([launch(layout=[1], layouts=3), *begun(1), *wild]))
    assert paces([]) == []


def test_the_median_has_weights() -> None:
    assert weighted_median([(1.0, 1), (2.0, 5), (9.0, 3)]) == 2.0
    assert weighted_median([]) == 0.0
