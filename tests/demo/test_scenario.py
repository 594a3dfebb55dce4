"""What became of the demo's faults, read from ledgers."""

from __future__ import annotations

import pytest

from resilio_hpc.core.ledger import Event
from resilio_hpc.devtools.demo.scenario import FaultOutcome, outcome

STRUCK = 100.0


def ledger(*entries: tuple[float, str, dict[str, object]]) -> list[Event]:
    return [Event(time, "7-n1", kind, fields) for time, kind, fields in entries]


@pytest.mark.parametrize(
    ("events", "recovery_s", "lost_steps"),
    [
        (ledger((90.0, "recovered", {"at": 90.0}), (101.0, "recovered", {"at": 100.8, "lost_steps": 3})), 0.8, 3),
        (ledger((105.0, "verdict", {}), (106.0, "launch", {}), (112.5, "first_step", {"restored": 120})), 12.5, None),
    ],
    ids=["in its job", "in the next job, since the time limit came first"],
)
def test_a_fault_that_the_run_came_over(events: list[Event], recovery_s: float, lost_steps: int | None) -> None:
    assert outcome("node_lost", "n2", STRUCK, events) == FaultOutcome("node_lost", "n2", True, recovery_s, lost_steps)


def test_a_first_step_in_the_same_job_is_no_recovery_yet() -> None:
    events = ledger((99.0, "verdict", {}), (100.5, "first_step", {}), (103.0, "verdict", {}))
    assert outcome("node_lost", "n2", STRUCK, events) == FaultOutcome("node_lost", "n2", False, None, None)
