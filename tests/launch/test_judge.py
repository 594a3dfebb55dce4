"""How a part of a run ended → whether the next one goes on. The causes are those of docs/chains.md."""

from __future__ import annotations

from typing import Any

import pytest

from resilio_hpc.launch.chain.continuation_policy import MAX_FRUITLESS, PredecessorEvidence, judge
from resilio_hpc.launch.chain.handover import Handover


def closed(carries_on: bool) -> Handover:
    return Handover("7", "n3", "batch_host_lost", carries_on, 0.0)


GOES_ON: dict[str, dict[str, Any]] = {
    "stopped before the time limit": {"verdict": "time_limit", "state": "COMPLETED"},
    "this job cannot go on": {"verdict": "needs_new_job", "state": "COMPLETED"},
    "closed by a survivor": {"verdict": "needs_new_job", "state": "CANCELLED", "handover": closed(True)},
    "time limit, no time to say so": {"state": "TIMEOUT"},
    "time limit, SIGTERM seen": {"verdict": "terminated", "state": "TIMEOUT"},
    "preempted, cancel mode": {"verdict": "terminated", "state": "PREEMPTED"},
    "preempted without a warning": {"state": "PREEMPTED"},
    "node failure, --no-requeue": {"state": "NODE_FAIL"},
    "nodes did not boot": {"state": "BOOT_FAIL"},
    "batch script died": {"state": "FAILED"},
    "scancel --batch -s KILL": {"state": "FAILED"},  # 0:9, as after the OOM killer: nobody can tell them apart
    "out of memory": {"state": "OUT_OF_MEMORY"},
    "no verdict, exit code 0": {"state": "COMPLETED"},
    "purged, no accounting": {"state": "UNKNOWN"},
    "SIGTERM, purged, no accounting": {"verdict": "terminated", "state": "UNKNOWN"},
    "slurmctld still tidies up": {"state": "COMPLETING"},
    "batch host lost, no verdict": {"state": "CANCELLED", "handover": closed(True)},
}
ENDS: dict[str, tuple[dict[str, Any], str]] = {
    "scancel": ({"verdict": "terminated", "state": "CANCELLED", "by": "20001"}, "cancelled"),
    "scancel -s KILL": ({"state": "CANCELLED"}, "cancelled"),
    "scancel during the stop": ({"verdict": "time_limit", "state": "CANCELLED"}, "cancelled"),
    "the supervisor knew of scancel": ({"verdict": "cancelled", "state": "COMPLETED"}, "cancelled"),
    "Ctrl-C": ({"verdict": "interrupted", "state": "FAILED"}, "interrupted"),
    "gave up": ({"verdict": "no_progress", "state": "FAILED"}, "no_progress"),
    "too few nodes": ({"verdict": "not_enough_nodes", "state": "FAILED"}, "not_enough_nodes"),
    "agents lost": ({"verdict": "agents_lost", "state": "FAILED"}, "agents_lost"),
    "--mode checkpoint": ({"verdict": "failed", "state": "FAILED"}, "failed"),
    "--deadline": ({"state": "DEADLINE"}, "cancelled"),
    "closed, nothing left to do": ({"state": "CANCELLED", "handover": closed(False)}, "cancelled"),
    "again and again": ({"state": "FAILED", "fruitless": MAX_FRUITLESS}, "no_progress"),
    "time limit below a start": (
        {"verdict": "time_limit", "state": "COMPLETED", "fruitless": MAX_FRUITLESS},
        "no_progress",
    ),
    "time limit below a save": ({"state": "TIMEOUT", "fruitless": MAX_FRUITLESS}, "no_progress"),
}


@pytest.mark.parametrize("cause", GOES_ON)
def test_the_next_job_of_a_chain_goes_on(cause: str) -> None:
    decision = judge(PredecessorEvidence("7", chained=True, **GOES_ON[cause]))
    assert decision.goes_on
    assert decision.clean is ("verdict" in GOES_ON[cause])


@pytest.mark.parametrize("cause", ENDS)
def test_the_chain_ends(cause: str) -> None:
    evidence, verdict = ENDS[cause]
    decision = judge(PredecessorEvidence("7", chained=True, **evidence))
    assert (decision.goes_on, decision.verdict) == (False, verdict)
    assert "7" in decision.reason or "3 jobs" in decision.reason


def test_who_cancelled_is_told() -> None:
    assert "by user 20001" in judge(PredecessorEvidence("7", chained=True, state="CANCELLED", by="20001")).reason


@pytest.mark.parametrize("state", ["PREEMPTED", "NODE_FAIL", "REQUEUED", "TIMEOUT", "UNKNOWN", "CANCELLED"])
def test_a_requeued_job_goes_on_where_its_own_part_before_stopped(state: str) -> None:
    decision = judge(PredecessorEvidence("7", requeued=True, state=state))
    assert decision.goes_on
    assert not decision.clean


def test_a_job_started_by_hand_goes_on_after_any_end() -> None:
    for evidence, _ in ENDS.values():
        assert judge(PredecessorEvidence("7", followed=False, **evidence)).goes_on


@pytest.mark.parametrize("requeued", [False, True])
@pytest.mark.parametrize("chained", [False, True])
def test_only_one_goes_on_while_another_job_has_the_run(chained: bool, requeued: bool) -> None:
    running = judge(PredecessorEvidence("18", chained=chained, requeued=requeued, followed=False, state="RUNNING"))
    assert (running.goes_on, running.verdict) == (False, "superseded")
    assert "job 18 carries this run on" in running.reason
    waiting = PredecessorEvidence(
        "18", chained=chained, requeued=requeued, followed=False, verdict="time_limit", successor="19"
    )
    assert judge(waiting).verdict == "superseded"
    assert "19" in judge(waiting).reason


def test_a_second_successor_takes_over_from_one_that_died_without_an_heir() -> None:
    decision = judge(PredecessorEvidence("18", chained=True, followed=False, state="NODE_FAIL"))
    assert decision.goes_on
    assert not decision.clean


def test_no_commit_in_several_parts_that_others_ended_is_nobodys_fault() -> None:
    for state in ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "UNKNOWN"):
        assert judge(PredecessorEvidence("7", chained=True, state=state, fruitless=9)).goes_on
