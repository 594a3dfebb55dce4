"""How far a run is, and what its script has logged, also where the ledger is torn, hostile or long."""

from __future__ import annotations

from typing import Any

import pytest

from resilio_hpc.core.ledger import Event
from resilio_hpc.report.progress import logged_points, progress
from resilio_hpc.report.screen import sparkline
from resilio_hpc.report.status import parse_status


def event(at: float, kind: str, /, **fields: Any) -> Event:
    return Event(at, "7-n1", kind, fields)


def status(at: float, step: int, **more: Any) -> Any:
    agents = {"n1": {"step": step, "step_s": 0.5, "silent_s": 0.1}}
    return parse_status({"time": at, "phase": "running", "members": [{"node": "n1"}], "agents": agents, **more})


LAUNCH = event(0, "launch", job="7", end_time=1000.0)
PLANNED = event(5, "steps_planned", round=0, start=0, total=200)
FIRST = event(10, "first_step", round=0, step=1)


def test_the_end_is_expected_at_the_rounds_pace() -> None:
    found = progress([LAUNCH, event(1, "successor", job="8"), PLANNED, FIRST], status(110, 101), 111.0)
    assert (found.step, found.total, found.next_job) == (101, 200, "8")
    assert found.left_s == pytest.approx(99.0) and found.job_left_s == pytest.approx(889.0)


@pytest.mark.parametrize(
    ("events", "of"),
    [
        ([LAUNCH, FIRST], status(110, 101)),  # no total
        ([LAUNCH, PLANNED, FIRST], None),
        ([LAUNCH, PLANNED, FIRST], status(110, 101, stalled_s=30.0)),
        ([LAUNCH, PLANNED, FIRST], status(110, 201)),  # more than it said
        ([LAUNCH, PLANNED, FIRST], status(110, 101, phase="starting")),
    ],
)
def test_no_end_is_guessed(events: list[Event], of: Any) -> None:
    assert progress(events, of, 111.0).left_s is None


def test_a_round_that_just_began_and_a_limit_that_moved() -> None:
    found = progress([LAUNCH, PLANNED, FIRST, event(11, "end_time", end_time=50.0)], status(11, 2), 60.0)
    assert (found.left_s, found.job_left_s) == (99.0, 0.0)


def test_points_are_of_one_rank_and_few() -> None:
    events = [event(at, "logged", rank=at % 2 * 4, step=at, values={"loss": 1.0 / (at + 1)}, sums={"tokens": 50},
                    seconds=2.0) for at in range(9000)]  # fmt: skip
    points = logged_points(events)
    assert len(points) <= 1001 and points[-1].step == 8998 and {one.step % 2 for one in points} == {0}
    assert points[0].rates == {"tokens": 25.0}


def test_wild_lines_do_no_harm() -> None:
    wild = event(1, "logged", rank="x", step=None, values={"a\x1b": "3", "b": True, "c": 1e400}, sums=[1],
                 seconds=float("nan"), not_finite=["\x07", 3])  # fmt: skip
    assert logged_points([wild]) == []
    (one,) = logged_points([event(1, "logged", **{**wild.fields, "rank": 0})])
    assert (one.values, one.rates, one.not_finite) == ({}, {}, ("?",))


def test_a_line_of_bars() -> None:
    assert (sparkline([]), sparkline([1.0]), sparkline([2.0, 2.0])) == ("", "", "▁▁")
    assert sparkline([0.0, 1.0, 7.0]) == "▁▂█" and len(sparkline(list(map(float, range(1000))))) <= 24
