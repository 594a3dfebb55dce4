"""Advice rests on what was measured, and says so where that is too little."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.ledger import Event
from resilio_hpc.report.accounting.causes import TimeCause
from resilio_hpc.report.chain.cost import gpus_per_node
from resilio_hpc.report.chain.report_text import report_lines
from resilio_hpc.report.chain.run_report import RunReport, build_report
from resilio_hpc.report.present import facts_of, present

HOUR = 3600.0


def event(at: float, kind: str, /, **fields: Any) -> Event:
    return Event(at, "7-n1", kind, fields)


def ledger(
    faults: int, lost: int = 10, every: float = 600.0, wait: float = 2.0, plan: str = "restart_ranks"
) -> list[Event]:
    """Twenty hours of a job of three nodes, two of which train."""
    events = [Event(0.0, "7-supervisor-main", "launch", {"job": "7", "nodes": ["n1", "n2", "n3"]})]
    events += [event(1, "round", round=0, members=["n1", "n2"]), event(10, "first_step", round=0, step=1, restored=-1)]
    step, at = 1, 10.0
    for number in range(faults + 1):
        until = 20 * HOUR / (faults + 1) * (number + 1)
        while at + every < until:
            at, step = at + every, step + 100
            events.append(event(at, "committed", step=step, seconds=0.1, blocked_s=wait))
        if number < faults:
            events += [
                event(until, "node_lost", node="n2", silent_s=5.0),
                event(until, "decision", round=number, rung=plan, reason=""),
                event(until + 1, "round", round=number + 1, members=["n1", "n2"]),
                event(until + 60, "first_step", round=number + 1, step=step + 1, restored=step, source="memory",
                      restore_s=1.0),
                event(until + 60, "recovered", round=number + 1, kind="node_lost", node="n2", lost_steps=lost,
                      restored=step, recovery_s=60.0, plan=plan),
            ]  # fmt: skip
            at = until + 60
    return [*events, event(20 * HOUR, "verdict", verdict="completed"), event(20 * HOUR, "launch_ends")]


def report(events: list[Event], gpus: int | None = None) -> RunReport:
    state = present(facts_of(events), 0.0, None, None, 20 * HOUR)
    return build_report(Path("/run"), "id", events, state, 20 * HOUR, None, gpus)


def advised(events: list[Event], number: int = 0) -> tuple[str, str]:
    one = report(events).advice[number]
    return one.change, one.why


def test_the_time_between_saves_is_dalys_with_the_measured_numbers() -> None:
    change, why = advised(ledger(faults=9))
    best = math.sqrt(2 * 2.0 * 20 * HOUR / 9) - 2.0
    assert f"save every {int(best) // 60} min {int(best) % 60:02d} s instead of 10 min 00 s" == change
    assert "every 2 h 13 min (9 in 20 h 00 min)" in why and "2.00 s of waiting per save" in why


def test_an_interval_near_the_best_one_stays() -> None:
    change, why = advised(ledger(faults=9, every=180.0))
    assert change == "" and why.startswith("as it is: a save every 3 min 00 s")


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (ledger(faults=2), "too little was measured: 2 faults"),
        (ledger(faults=9, lost=0), "none of 9 faults cost a step"),
        (ledger(faults=9, every=1e9), "too little was measured: 0 saves"),
    ],
    ids=["few faults", "faults that cost nothing", "no saves"],
)
def test_nothing_is_advised_from_too_little(events: list[Event], said: str) -> None:
    change, why = advised(events)
    assert change == "" and said in why


def test_spares_are_advised_where_a_lost_node_had_none() -> None:
    change, why = advised(ledger(faults=3, plan="wait_for_node"), 1)
    assert change == "keep 1 more spare" and "3 times no spare was there" in why
    assert advised(ledger(faults=3, plan="replace_node"), 1)[0] == ""


def test_cost_is_in_gpu_hours_where_gpus_are_known() -> None:
    with_gpus, without = report(ledger(faults=3), 8), report(ledger(faults=3))
    assert (with_gpus.cost.unit, without.cost.unit) == ("GPU-hours", "node-hours")
    assert with_gpus.cost.hours() == pytest.approx(8 * without.cost.hours()) == pytest.approx(8 * 3 * 20)
    assert with_gpus.cost.hours(TimeCause.IDLE) == pytest.approx(8 * 20, rel=0.01)  # the third node
    assert "no GPU is known of" in "\n".join(report_lines(without, 100))


def test_gpus_are_counted_from_samples_and_never_guessed() -> None:
    of_two = {"values": {"gpu_lost{gpu=0}": 0, "gpu_power_watts{gpu=0}": 1, "gpu_lost{gpu=1}": 0, "host_load1": 2}}
    assert gpus_per_node([of_two, of_two]) == 2
    assert gpus_per_node([of_two, {"values": {"gpu_lost{gpu=0}": 0}}]) is None
    assert gpus_per_node([{"values": {"host_load1": 2}}]) is None
    assert gpus_per_node([{}, {"values": "x"}]) is None
    assert gpus_per_node([]) is None
