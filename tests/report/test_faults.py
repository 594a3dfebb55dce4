"""Faults of a run, told from its ledger."""

from __future__ import annotations

from typing import Any

import pytest

from resilio_hpc.core.ledger import Event
from resilio_hpc.report import faults


def event(at: float, kind: str, writer: str = "7-n1", /, **fields: Any) -> Event:
    return Event(at, writer, kind, fields)


def launch(at: float, job: str = "7") -> Event:
    return event(at, "launch", f"{job}-supervisor-main", job=job, nodes=["n1", "n2", "n3"])


def rank_failed(at: float, rank: int = 3, kind: str = "signal", **fields: Any) -> Event:
    how = {"signal": 9, "exit_code": None} if kind == "signal" else {"signal": None, "exit_code": 1}
    return event(at, "rank_failed", round=0, node="n2", rank=rank, local_rank=1, kind=kind, **how, **fields)


ROUND = event(1, "round", round=0, members=["n1", "n2"], world_size=4)
RESTART = event(10.25, "decision", rung="restart_ranks", reason="the nodes are fine")


def recovered(at: float, kind: str, node: str = "n2", rank: int | None = None, **fields: Any) -> Event:
    return event(at, "recovered", kind=kind, node=node, rank=rank, round=1, recovery_s=0.5, lost_steps=2,
                 plan="restart_ranks", **fields)  # fmt: skip


def told(events: list[Event]) -> list[tuple[Any, ...]]:
    return [(f.kind, f.node, f.rank, f.time, f.recovered, f.recovery_s, f.detection_s) for f in faults(events)]


CASES: dict[str, tuple[list[Event], list[tuple[Any, ...]]]] = {
    "nothing happened": ([launch(0), ROUND, event(9, "verdict", verdict="completed")], []),
    "a killed rank": (
        [launch(0), ROUND, rank_failed(10), RESTART, recovered(10.5, "rank_killed", rank=3)],
        [("rank_killed", "n2", 3, 10, True, 0.5, 0.25)],
    ),
    "a lost node, noticed after its last beat": (
        [launch(0), ROUND, event(15, "node_lost", node="n2", silent_s=5.0), recovered(15.5, "node_lost")],
        [("node_lost", "n2", None, 10, True, 0.5, 5.0)],
    ),
    "detection as the ledger has it": (
        [launch(0), ROUND, rank_failed(10), RESTART, recovered(10.5, "rank_killed", rank=3, detection_s=0.125)],
        [("rank_killed", "n2", 3, 10, True, 0.5, 0.125)],
    ),
    "failed ranks of a lost node are one fault": (
        [launch(0), ROUND, rank_failed(10, 0, "exit"), event(15, "node_lost", node="n2", silent_s=4.0),
         recovered(15.5, "node_lost")],
        [("node_lost", "n2", None, 10, True, 0.5, 4.0)],
    ),
    "a spare that is lost needs no recovery": (
        [launch(0), ROUND, event(15, "node_lost", node="n3", silent_s=5.0)],
        [("spare_lost", "n3", None, 10, True, None, 5.0)],
    ),
    "a lost agent": (
        [launch(0), ROUND, event(10, "agent_ended", "7-supervisor-main", node="n2", exit_code=-9),
         recovered(11, "agent_lost")],
        [("agent_lost", "n2", None, 10, True, 0.5, None)],
    ),
    "a lost controller is found on its node": (
        [launch(0), ROUND, event(10, "agent_ended", "7-supervisor-main", node="n1", exit_code=-9),
         recovered(11, "controller_lost", node="")],
        [("controller_lost", "n1", None, 10, True, 0.5, None)],
    ),
    "never recovered": (
        [launch(0), ROUND, rank_failed(10, 2, "exit"), rank_failed(10.01, 3), RESTART,
         event(12, "verdict", verdict="no_progress")],
        [("rank_killed", "n2", 3, 10, False, None, pytest.approx(0.24))],
    ),
    "the verdict knows who was first": (
        [launch(0), ROUND, rank_failed(10, 2, "exit"), rank_failed(10.5, 3), event(
            12, "verdict", verdict="no_progress", first_failure={"node": "n2", "rank": 2})],
        [("rank_exception", "n2", 2, 10, False, None, None)],
    ),
    "still recovering": ([launch(0), ROUND, rank_failed(10)], [("rank_killed", "n2", 3, 10, False, None, None)]),
    "ranks that end while stopping are no fault": (
        [launch(0), ROUND, event(9, "stopping", reason="time_limit"), rank_failed(10),
         event(11, "verdict", verdict="time_limit")],
        [],
    ),
    "the job died with its fault open, the next one runs": (
        [launch(0), ROUND, rank_failed(10), launch(50, "8"), event(51, "round", "8-n1", round=1, members=["n1"]),
         event(52, "verdict", "8-n1", verdict="completed")],
        [("rank_killed", "n2", 3, 10, False, None, None)],
    ),
    "a node that left": (
        [launch(0), ROUND, event(10, "agent_left", node="n2", reason="SIGTERM"), recovered(11, "node_lost")],
        [("node_lost", "n2", None, 10, True, 0.5, None)],
    ),
    "a leftover of an earlier round does not name the fault": (
        [launch(0), ROUND, event(10, "slow_start", round=0, waited_s=5), recovered(11, "slow_start", node="")],
        [("slow_start", "", None, 10, True, 0.5, None)],
    ),
    "fields of wrong types": (
        [launch(0), event(1, "round", members=7), event(2, "rank_failed", rank="x", node=3, kind=None),
         event(3, "recovered", kind=[], recovery_s="soon", rank=True)],
        [("unknown", "", None, 2, True, None, None)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_faults(name: str) -> None:
    events, expected = CASES[name]
    assert told(events) == expected


@pytest.mark.parametrize("times", [(10, 11, 12, 13), (10, 12, 11, 13)], ids=["in turn", "before it is on record"])
def test_a_rank_that_fails_and_starts_again_alone_twice(times: tuple[float, ...]) -> None:
    kinds = ["rank_failed", "rank_restarted"] * 2
    each = {"rank_failed": rank_failed(0, alone=True).fields, "rank_restarted": {"rank": 3, "seconds": 0.5}}
    events = [event(at, kind, **each[kind]) for at, kind in zip(times, kinds, strict=True)]
    events = sorted(events, key=lambda one: one.time)
    found = faults([launch(0), ROUND, *events, event(20, "verdict", verdict="completed")])
    assert [(one.kind, one.rank, one.plan) for one in found] == [("rank_killed", 3, "restart_rank")] * 2
    assert all(one.recovered for one in found)


def test_a_fault_tells_its_cost_and_what_was_done() -> None:
    (fault,) = faults([launch(0), ROUND, rank_failed(10), RESTART, recovered(10.5, "rank_killed", rank=3)])
    assert (fault.lost_steps, fault.plan, fault.round) == (2, "restart_ranks", 0)
    assert fault.message == "rank 3 on n2 killed by SIGKILL"
