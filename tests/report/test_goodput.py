"""Goodput: useful time / total time, with every second of the total in exactly one part."""

from __future__ import annotations

from typing import Any

import pytest

from resilio_hpc.core.ledger import Event
from resilio_hpc.report import Goodput, goodput


def event(at: float, kind: str, job: str = "7", /, **fields: Any) -> Event:
    return Event(at, f"{job}-n1", kind, fields)


def launch(at: float, job: str = "7") -> Event:
    return event(at, "launch", job, job=job)


def round_(at: float, number: int, job: str = "7") -> Event:
    return event(at, "round", job, round=number, members=["n1", "n2"])


def first(at: float, number: int, step: int, restored: int = -1, job: str = "7") -> Event:
    return event(at, "first_step", job, round=number, step=step, restored=restored)


def failed(at: float, number: int) -> Event:
    return event(at, "rank_failed", round=number, node="n2", rank=3)


def recovered(at: float, number: int, lost: int | None, restored: int) -> Event:
    return event(at, "recovered", round=number, lost_steps=lost, restored=restored)


def verdict(at: float, name: str = "completed", job: str = "7", **fields: Any) -> list[Event]:
    return [event(at, "verdict", job, verdict=name, **fields), event(at + 1, "launch_ends", job)]


# events, (total, useful, redone, startup, recovery, closing)
CASES: dict[str, tuple[list[Event], tuple[float, ...]]] = {
    "an undisturbed run": (
        [launch(0), round_(2, 0), first(10, 0, 1), *verdict(110)],
        (111, 100, 0, 10, 0, 1),
    ),
    "a killed rank, nothing lost": (
        [launch(0), round_(2, 0), first(10, 0, 1), failed(60, 0), round_(60.1, 1), first(65, 1, 51, 50),
         recovered(65, 1, 0, 50), *verdict(110)],
        (111, 95, 0, 10, 5, 1),
    ),
    "a hang that ends by itself": (
        [launch(0), round_(2, 0), first(10, 0, 1), event(50, "stalled", round=0, step=40, silent_s=2.0),
         event(80, "goes_on", round=0, step=41, waited_s=32.0), *verdict(110)],
        (111, 68, 0, 10, 0, 1),
    ),
    "a hang whose end another controller saw": (
        [launch(0), round_(2, 0), first(10, 0, 1), event(50, "stalled", round=0, step=40, silent_s=2.0),
         event(60, "committed", step=40), event(80, "committed", step=50), *verdict(110)],
        (111, 68, 0, 10, 0, 1),
    ),
    "a hang that ends with its round": (
        [launch(0), round_(2, 0), first(10, 0, 1), event(30, "stalled", round=0, step=9, silent_s=2.0), failed(60, 0),
         round_(60.1, 1), first(65, 1, 10, 9), recovered(65, 1, 0, 9), *verdict(110)],
        (111, 63, 0, 10, 5, 1),
    ),
    "half of a round done again": (
        [launch(0), round_(2, 0), first(10, 0, 0), failed(60, 0), round_(60.1, 1), first(65, 1, 26, 25),
         recovered(65, 1, 25, 25), *verdict(110)],
        (111, 70, 25, 10, 5, 1),
    ),
    "a deep fall does two rounds again": (
        [launch(0), round_(2, 0), first(10, 0, 0), failed(20, 0), round_(20, 1), first(20, 1, 10, 10),
         recovered(20, 1, 0, 10), failed(30, 1), round_(30, 2), first(30, 2, 5, 5), recovered(30, 2, 15, 5),
         *verdict(40)],
        (41, 15, 15, 10, 0, 1),
    ),
    "a lost node counts from its last beat": (
        [launch(0), round_(2, 0), first(10, 0, 1), event(60, "node_lost", node="n2", silent_s=5.0), round_(60, 1),
         first(65, 1, 51, 50), recovered(65, 1, 0, 50), *verdict(110)],
        (111, 90, 0, 10, 10, 1),
    ),
    "a lost spare costs nothing": (
        [launch(0), round_(2, 0), first(10, 0, 1), event(60, "node_lost", node="n9", silent_s=5.0), *verdict(110)],
        (111, 100, 0, 10, 0, 1),
    ),
    "a script that reports no steps": (
        [launch(0), round_(2, 0), event(5, "ranks_started", round=0), failed(60, 0), round_(60, 1),
         event(61, "ranks_started", round=1), recovered(61, 1, None, -1), *verdict(110)],
        (111, 104, 0, 5, 1, 1),
    ),
    "a round that never came up": (
        [launch(0), round_(2, 0), round_(30, 1), first(40, 1, 1), *verdict(50)],
        (51, 10, 0, 40, 0, 1),
    ),
    "a chain: the queue between its jobs is no part of the total": (
        [launch(0), round_(2, 0), first(10, 0, 1), event(100, "stop_agreed", step=91),
         *verdict(100, "time_limit", committed=91), launch(1000, "8"), round_(1001, 1, "8"),
         first(1010, 1, 92, 91, "8"), *verdict(1100, job="8")],
        (202, 180, 0, 20, 0, 2),
    ),
    "a job that was killed between checkpoints": (
        [launch(0), round_(2, 0), first(10, 0, 1), event(50, "committed", step=40), event(70, "committed", step=60),
         event(90, "agent"), launch(1000, "8"), round_(1001, 1, "8"), first(1010, 1, 61, 60, "8"),
         *verdict(1100, job="8")],
        (191, 150, 20, 20, 0, 1),
    ),
    "given up: what was not committed is lost": (
        [launch(0), round_(2, 0), first(10, 0, 0), event(30, "committed", step=20), failed(50, 0),
         *verdict(50, "no_progress", committed=20)],
        (51, 20, 20, 10, 0, 1),
    ),
    "nothing but a launch": ([launch(0)], (0, 0, 0, 0, 0, 0)),
    "an empty ledger": ([], (0, 0, 0, 0, 0, 0)),
    "no launch in the ledger, and fields of wrong types": (
        [event(0, "round", round="x"), event(1, "round", round=0, members={}), event(2, "first_step", round=0, step=[]),
         event(12, "committed", step=None), event(12, "recovered", round=None, lost_steps=3)],
        (12, 10, 0, 2, 0, 0),
    ),
}  # fmt: skip


def parts(g: Goodput) -> tuple[float, ...]:
    return (g.total_s, g.useful_s, g.redone_s, g.startup_s, g.recovery_s, g.closing_s)


@pytest.mark.parametrize("name", CASES)
def test_every_second_is_in_one_part(name: str) -> None:
    events, expected = CASES[name]
    found = goodput(sorted(events, key=lambda event: event.time))
    assert parts(found) == pytest.approx(expected)
    assert sum(parts(found)[1:]) + found.stalled_s == pytest.approx(found.total_s)


def test_a_run_that_goes_on_counts_until_now() -> None:
    found = goodput([launch(0), first(5, 0, 1), round_(2, 0), first(10, 0, 1)], now=30)
    assert parts(found) == (30, 20, 0, 10, 0, 0)
    assert found.share == pytest.approx(2 / 3)


def test_the_share_of_no_time_is_unknown() -> None:
    assert goodput([]).share is None


def test_queued_time_is_told_apart() -> None:
    events, _ = CASES["a chain: the queue between its jobs is no part of the total"]
    found = goodput(events)
    assert (found.queued_s, found.jobs, found.rounds) == (899, 2, 2)


def test_steps_that_are_not_reported_make_the_share_an_upper_bound() -> None:
    assert not goodput(CASES["a script that reports no steps"][0]).steps_known
    assert goodput(CASES["an undisturbed run"][0]).steps_known
