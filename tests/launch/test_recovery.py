"""The recovery ladder, as a table, and which failure is blamed."""

from __future__ import annotations

import pytest

from resilio_hpc.events.rungs import Rung
from resilio_hpc.launch.controller.facts.recovery_policy import Budgets, Failure, World, decide
from resilio_hpc.launch.controller.facts.rendezvous import NodeCounts
from resilio_hpc.launch.protocol.messages import RankFailure
from resilio_hpc.launch.protocol.root_cause import is_consequence, origin
from tests.support.environments import ROOT

FRESH = Budgets(1, 3)
FIXED, ELASTIC = NodeCounts(4, 4), NodeCounts(2, 4)


@pytest.mark.parametrize(
    ("lost", "available", "coming", "shape", "budgets", "rung"),
    [
        ((), 4, 0, FIXED, FRESH, Rung.RESTART),
        ((), 5, 0, FIXED, FRESH, Rung.RESTART),
        (("n2",), 4, 0, FIXED, FRESH, Rung.REPLACE),
        ((), 3, 1, FIXED, FRESH, Rung.WAIT),
        ((), 3, 1, ELASTIC, FRESH, Rung.WAIT),
        (("n2",), 3, 0, ELASTIC, FRESH, Rung.SHRINK),
        (("n2",), 3, 0, FIXED, FRESH, Rung.STOP),
        (("n2",), 3, 0, FIXED, Budgets(1, 3, chained=True), Rung.NEXT_JOB),
        (("n2",), 1, 0, ELASTIC, FRESH, Rung.STOP),
        ((), 4, 0, FIXED, Budgets(3, 3), Rung.RESTART),
        ((), 4, 0, FIXED, Budgets(4, 3), Rung.STOP),
        ((), 4, 0, FIXED, Budgets(4, 3, chained=True), Rung.STOP),
        ((), 4, 0, FIXED, Budgets(1, 0), Rung.STOP),
    ],
)
def test_the_lowest_rung_that_can_help(
    lost: tuple[str, ...], available: int, coming: int, shape: NodeCounts, budgets: Budgets, rung: Rung
) -> None:
    plan = decide(Failure(lost), World(4, available, coming, shape), budgets)
    assert plan.rung is rung
    assert plan.reason


def test_every_rung_is_in_the_pages_on_the_ledger() -> None:
    lines = (ROOT / "docs" / "ledger.md").read_text().splitlines()
    (row,) = [line for line in lines if line.startswith("| `decision`")]
    assert f"({', '.join(rung.value for rung in Rung)})" in row


def failure(rank: int, time: float, kind: str = "exit", message: str = "") -> RankFailure:
    return RankFailure("n1", rank, rank, kind, time, message=message)


def test_a_signal_beats_an_earlier_echo() -> None:
    echo = failure(0, 10.0, message="RuntimeError: Connection closed by peer [10.0.0.2]:3456")
    assert is_consequence(echo)
    assert origin([echo, failure(3, 10.2, "signal")]) == failure(3, 10.2, "signal")


def test_among_equals_the_earliest_is_blamed() -> None:
    assert origin([failure(0, 11.0), failure(1, 10.0), failure(2, 12.0)]) == failure(1, 10.0)
    echoes = [failure(rank, 10.0 - rank, message="Broken pipe") for rank in range(3)]
    assert origin(echoes) == echoes[2]
    assert origin([]) is None


def test_a_script_that_prints_such_words_and_is_killed_is_no_echo() -> None:
    assert not is_consequence(failure(0, 1.0, "signal", "connection reset by peer"))
