"""Drills of a live run: to whom they are refused, whom they meet, and that the ledger's readers know them as drills."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from resilio_hpc.alerts.of_recovery import recent_failures
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.ledger import Event
from resilio_hpc.drills import live
from resilio_hpc.drills.drill_words import drill_of
from resilio_hpc.events.event_text import words
from resilio_hpc.launch.chain.suspect_nodes import suspect_nodes
from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.controller.facts.state import Phase, Record, Send
from resilio_hpc.launch.controller.faults import drill_orders
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.rundir.user_orders import UserOrder, parse
from resilio_hpc.report.faults import faults
from resilio_hpc.report.status import NodeStatus, Status

NODES = (NodeStatus("n1", "training", 0, 2), NodeStatus("n2", "training", 2, 2), NodeStatus("n3", "spare"))
STATUS = Status(100.0, 1, "n1", "running", 0, 0, 0, 40, NODES)
ME = 1000


def overview(**more: Any) -> Any:
    fields: dict[str, Any] = {"path": "/runs/a", "state": "running", "status": STATUS, "verdict": None, "silent_s": 1.0}
    return SimpleNamespace(**{**fields, **more})


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (overview(state="ended", verdict=SimpleNamespace(verdict="out_of_memory")), "has ended (out of memory)"),
        (overview(state="stale", silent_s=60.0), "nothing was heard of the run for 60 s"),
        (overview(state="starting"), "recovers from a fault"),
        (overview(state="running", status=None), "recovers from a fault"),
        (overview(status=replace(STATUS, stalled_s=9.0)), "stands still"),
        (overview(status=replace(STATUS, committed=None)), "no checkpoint is committed"),
    ],
)
def test_a_run_that_cannot_come_over_it_is_not_struck(seen: Any, said: str) -> None:
    assert said in live.refusal(seen, ME, ME, force=False)


def test_a_run_that_trains_is_struck_and_one_without_a_checkpoint_by_force_alone() -> None:
    assert live.refusal(overview(), ME, ME, force=False) == ""
    assert live.refusal(overview(status=replace(STATUS, committed=None)), ME, ME, force=True) == ""


def test_another_users_run_is_refused_also_by_force() -> None:
    assert "another user (uid 1001)" in live.refusal(overview(), 1001, ME, force=True)
    assert "another user" in live.refusal(overview(), ME, 0, force=True)  # root's own runs only, too


def plan(name: str, rank: int | None = None) -> live.LivePlan:
    return live.plan(drill_of(name), STATUS, rank, random.Random(1))


def test_a_rank_is_drawn_from_those_that_train_away_from_the_controller() -> None:
    assert {live.plan(drill_of("rank-sigkill"), STATUS, None, random.Random(n)).rank for n in range(40)} == {2, 3}
    assert plan("rank-sigstop", 1) == live.LivePlan("rank-sigstop", "stop_rank", "n1", 1)
    assert plan("agent-sigkill").node == "n2"
    assert (plan("controllers-agent-sigkill").fault, plan("controllers-agent-sigkill").node) == (
        "kill_controller",
        "n1",
    )
    assert plan("rank-sigkill", 3).text == "SIGKILL for rank 3 on n2"


@pytest.mark.parametrize(
    ("name", "rank", "said"),
    [
        ("rank-sigkill", 4, "no rank 4"),
        ("controllers-agent-sigkill", 2, "no rank 2"),
        ("node-power-cut-with-a-spare", None, "not for a live run"),
        ("shared-directory-hangs-for-60-s", None, "not for a live run"),
        ("gpu-with-an-uncorrectable-error-with-a-spare", None, "not for a live run"),
        ("srun-rank-sigkill", None, "not for a live run"),
    ],
)
def test_what_cannot_be_done_to_a_live_run_is_refused(name: str, rank: int | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan(name, rank)


# -- the controller ----------------------------------------------------------------------------------------------------

MEMBERS = (m.Member("n1", "n1", 0, 0, 2), m.Member("n2", "n2", 1, 2, 2))
AT = 5000.0
ORDER = UserOrder("drill", "mark", "me", fault="kill_rank", rank=3, at=AT)


def run_state(**more: Any) -> Any:
    fields: dict[str, Any] = {
        "config": SimpleNamespace(mode=Mode.RECOVER, max_without_progress=3), "phase": Phase.RUNNING, "recovery": None,
        "stopping": False, "pausing": False, "leads": True, "committed": 40, "without_progress": 0, "epoch": 5,
        "round": 2, "max_step": 47, "members": MEMBERS, "node": "n1", "drilled": {}, "now": lambda: 9.0,
        "unix": lambda: AT,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **more})


def test_the_controller_records_the_drill_before_the_agent_hears_of_it() -> None:
    run = run_state()
    record, sent = drill_orders.actions(run, ORDER)
    assert isinstance(record, Record) and isinstance(sent, Send)
    assert record.fields == {"asked": "mark", "by": "me", "fault": "kill_rank", "node": "n2", "rank": 3, "step": 47,
                             "round": 2, "why": ""}  # fmt: skip
    assert (sent.node, sent.message) == ("n2", m.DrillStrike(5, 2, "kill_rank", 1))
    assert run.drilled == {"n2": 9.0}


def test_the_controllers_own_agent_is_found_by_the_controller() -> None:
    _, sent = drill_orders.actions(run_state(), UserOrder("drill", "mark", fault="kill_controller", rank=2, at=AT))
    assert isinstance(sent, Send) and (sent.node, sent.message.blow) == ("n1", "kill_agent")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("state", "order", "said"),
    [
        ({"phase": Phase.STARTING}, {}, "does not train now"),
        ({"recovery": object()}, {}, "does not train now"),
        ({"leads": False}, {}, "does not train now"),
        ({"stopping": True}, {}, "is ending"),
        ({"pausing": True}, {}, "pause"),
        ({"committed": -1}, {}, "no checkpoint"),
        ({"without_progress": 2}, {}, "too few restarts"),
        ({"config": SimpleNamespace(mode=Mode.OBSERVE, max_without_progress=3)}, {"force": True}, "restarts nothing"),
        ({}, {"rank": 4}, "no rank 4"),
        ({}, {"rank": -1}, "no rank -1"),
        ({}, {"fault": "burn_node"}, "knows no fault"),
        ({}, {"at": AT - 301.0}, "is 301 s old"),  # of a command that was killed, taken by the next job
        ({}, {"at": 0.0, "force": True}, "s old"),
    ],
)
def test_the_controller_refuses_what_the_run_cannot_take_now(
    state: dict[str, Any], order: dict[str, Any], said: str
) -> None:
    run = run_state(**state)
    fields = {"fault": "kill_rank", "rank": 3, "at": AT, **order}
    (record,) = drill_orders.actions(run, UserOrder("drill", "mark", "me", **fields))
    assert isinstance(record, Record) and said in record.fields["why"]
    assert run.drilled == {}
    assert "not done" in words("drill", record.fields)


def test_an_order_is_read_without_trust() -> None:
    assert parse("drill", {"mark": "m", "fault": "kill_rank", "rank": 3, "force": True}) == UserOrder(
        "drill", "m", fault="kill_rank", rank=3, force=True
    )
    assert parse("drill", {"mark": "m", "fault": 7, "rank": "3", "force": "yes"}) == UserOrder("drill", "m")
    assert parse("drill", {"fault": "kill_rank"}) is None


# -- readers of the ledger ---------------------------------------------------------------------------------------------


def ledger(*events: tuple[float, str, dict[str, Any]]) -> list[Event]:
    return [Event(at, "w", kind, fields) for at, kind, fields in events]


LAUNCH = (1.0, "launch", {"job": "7", "mode": "batch", "nodes": ["n1", "n2"]})
ROUND = (2.0, "round", {"round": 0, "members": ["n1", "n2"], "world_size": 4})
DRILL = (50.0, "drill", {"fault": "kill_agent", "node": "n2", "rank": -1, "by": "me", "why": ""})
LOST = {"node": "n2", "silent_s": 5.0}
RECOVERED = {"kind": "node_lost", "node": "n2", "recovery_s": 6.0, "lost_steps": 1}


def test_a_failure_that_was_made_on_purpose_is_a_drill_and_the_next_one_is_not() -> None:
    found = faults(
        ledger(LAUNCH, ROUND, DRILL, (55.0, "node_lost", LOST), (57.0, "recovered", RECOVERED),
               (80.0, "node_lost", LOST), (81.0, "recovered", RECOVERED))
    )  # fmt: skip
    assert [fault.drill for fault in found] == ["kill_agent", ""]


def test_the_failure_of_another_node_or_before_the_drill_is_none() -> None:
    other = {**RECOVERED, "node": "n1"}
    events = ledger(LAUNCH, ROUND, DRILL, (55.0, "node_lost", {**LOST, "node": "n1"}), (57.0, "recovered", other))
    assert [fault.drill for fault in faults(events)] == [""]
    early = ledger(LAUNCH, ROUND, DRILL, (52.0, "node_lost", LOST), (53.0, "recovered", RECOVERED))
    assert [fault.drill for fault in faults(early)] == [""]  # it was silent since before the drill


def test_a_drill_that_was_not_done_explains_nothing() -> None:
    refused = (50.0, "drill", {**DRILL[2], "why": "the run is ending"})
    events = ledger(LAUNCH, ROUND, refused, (56.0, "node_lost", LOST), (57.0, "recovered", RECOVERED))
    assert [fault.drill for fault in faults(events)] == [""]


def test_the_node_of_a_drill_is_not_blamed() -> None:
    assert suspect_nodes(ledger(LAUNCH, ROUND, DRILL, (55.5, "node_lost", LOST))) == []
    blamed = suspect_nodes(ledger(LAUNCH, ROUND, DRILL, (57.0, "recovered", RECOVERED), (90.0, "node_lost", LOST)))
    assert [fault.node for fault in blamed] == ["n2"]


def test_no_storm_of_restarts_is_made_of_drills() -> None:
    found = faults(
        ledger(LAUNCH, ROUND, DRILL, (55.0, "node_lost", LOST), (57.0, "recovered", RECOVERED),
               (80.0, "node_lost", LOST), (81.0, "recovered", RECOVERED))
    )  # fmt: skip
    facts: Any = SimpleNamespace(faults=tuple(found), until=100.0, now=100.0)
    assert [fault.time for fault in recent_failures(facts)] == [75.0]


# -- what became of it -------------------------------------------------------------------------------------------------


def result(
    end: Event | None, world: tuple[int, int] = (4, 4), step: int | None = 60, state: str = ""
) -> live.LiveResult:
    return live.result_of(plan("rank-sigkill", 3), 50.0, end, state or live.NOT_COMPARED, world, step, 47)


def test_a_run_that_went_on_has_passed_and_nothing_is_claimed_of_values_that_were_not_compared() -> None:
    (end,) = ledger((57.0, "recovered", {**RECOVERED, "detection_s": 0.1}))
    found = result(end)
    assert found.passed and found.state.startswith("not checked")
    assert (found.recovery_s, found.repeated_steps, found.detection_s) == (6.0, 1, 0.1)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"world": (4, 2)}, "2 ranks train now, not 4"),
        ({"step": None}, "no step beyond"),
        ({"step": 47}, "no step beyond"),
        ({"state": "WRONG: replicas differ at step 50"}, "replicas differ"),
    ],
)
def test_a_run_that_did_not_go_on_as_before_has_not(more: dict[str, Any], said: str) -> None:
    (end,) = ledger((57.0, "recovered", RECOVERED))
    assert not (found := result(end, **more)).passed and said in found.why


def test_a_run_that_ended_or_did_not_recover_has_not() -> None:
    (verdict,) = ledger((57.0, "verdict", {"verdict": "no_progress"}))
    assert "no_progress" in result(verdict).why
    assert "not recovered in time" in result(None).why


def test_what_the_run_says_of_its_replicas_is_the_state_check() -> None:
    equal, differ = (9.0, "step_verified", {"step": 50, "by": 51}), (9.0, "digests_differ", {"step": 50})
    assert not live.compares(ledger(LAUNCH)) and live.compares(ledger(LAUNCH, equal))
    assert live.compared(ledger(LAUNCH)) == ""
    assert live.compared(ledger(equal)) == "right: replicas were equal after step 50"
    assert live.compared(ledger(differ)).startswith("WRONG")
