"""What became of faults, over the jobs of a chain: by itself, by hand, or not at all; and why they happened."""

from __future__ import annotations

from typing import Any

import pytest

from resilio_hpc.core.ledger import Event
from resilio_hpc.report.accounting.run_time import run_time
from resilio_hpc.report.chain.recoveries import ChainRecovery, recoveries


def event(at: float, kind: str, job: str = "7", /, **fields: Any) -> Event:
    return Event(at, f"{job}-n1", kind, fields)


def launch(at: float, key: str = "7") -> Event:
    return Event(at, f"{key}-supervisor-main", "launch", {"job": key.partition("r")[0], "nodes": ["n1", "n2"]})


def begun(at: float, number: int, job: str = "7") -> list[Event]:
    return [event(at, "round", job, round=number, members=["n1", "n2"]),
            event(at + 5, "first_step", job, round=number, step=1, restored=-1)]  # fmt: skip


FAILED = event(50, "rank_failed", round=0, node="n2", rank=3, kind="exit", exit_code=1, place="train.py:88",
               message="ValueError: nan\nmore", **{"class": "user_code"})  # fmt: skip
ECHO = event(50.2, "rank_failed", round=0, node="n1", rank=0, kind="exit", message="Connection reset", echo=True)
ORIGIN = event(50.4, "origin", round=0, node="n2", rank=3, primary=True, confidence=0.8, evidence="rank 3 was first")
ECHOES = event(50.4, "echoes", round=0, node="n2", rank=3, count=7, logs="/logs")
DECIDED = event(50.3, "decision", round=0, rung="restart_ranks", reason="")
ENDED = [event(60, "verdict", verdict="needs_new_job", committed=3), event(61, "launch_ends")]


def found(*events: Event, goes_on: bool = False) -> list[ChainRecovery]:
    story = sorted(events, key=lambda one: one.time)
    return recoveries(story, run_time(story), goes_on)


def test_a_recovery_in_the_job_has_its_cause_its_root_and_its_echoes() -> None:
    again = event(70, "recovered", round=1, kind="rank_exception", node="n2", rank=3, recovery_s=20.0, lost_steps=4)
    (one,) = found(launch(0), *begun(1, 0), FAILED, ECHO, ORIGIN, ECHOES, DECIDED, *begun(65, 1), again)
    assert (one.outcome.value, one.part, one.cause, one.confidence, one.primary) == (
        "automatic", "7", "rank 3 was first", 0.8, True,
    )  # fmt: skip
    assert (one.root, one.place, one.failure_class, one.echoes) == (
        "ValueError: nan\nmore",
        "train.py:88",
        "user_code",
        7,
    )
    assert [line.kind for line in one.lines] == ["rank_failed", "origin", "echoes", "decision", "recovered"]
    assert one.down_s == 20.0


def test_no_primary_cause_is_said() -> None:
    (one,) = found(launch(0), *begun(1, 0), FAILED, event(51, "origin", round=0, node="n2", rank=3, primary=False,
                                                          confidence=0.4, evidence="two at once"), DECIDED)  # fmt: skip
    assert (one.primary, one.confidence) == (False, 0.4)


@pytest.mark.parametrize(
    ("before", "key", "outcome"),
    [
        ([event(2, "successor", job="8", link=2)], "8", "automatic"),
        ([event(2, "successor", job="8", link=2, acted=False)], "8", "by hand"),
        ([], "8", "by hand"),
        ([], "7r1", "automatic"),
    ],
    ids=["the chain's next job", "the chain would have, and was not allowed to", "a job by hand", "a requeue"],
)
def test_who_went_on_in_another_job(before: list[Event], key: str, outcome: str) -> None:
    (one,) = found(launch(0), *before, *begun(1, 0), FAILED, DECIDED, *ENDED, launch(100, key), *begun(101, 1, key))
    assert (one.outcome.value, one.down_s) == (outcome, pytest.approx(56.0))


def test_a_fault_after_which_nothing_trained_has_failed_or_is_under_way() -> None:
    ledger = (launch(0), *begun(1, 0), FAILED, DECIDED)
    assert [one.outcome.value for one in found(*ledger, *ENDED)] == ["failed"]
    assert [one.outcome.value for one in found(*ledger, *ENDED, launch(100, "8"))] == ["failed"]
    assert [one.outcome.value for one in found(*ledger, goes_on=True)] == ["under way"]


def test_a_lost_spare_needs_no_recovery() -> None:
    (one,) = found(launch(0), *begun(1, 0), event(50, "node_lost", node="n9", silent_s=5.0))
    assert one.outcome.value == "not needed"
