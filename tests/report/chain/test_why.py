"""What is said of a run: what broke, how sure that is, what was done, and how it stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.ledger import Event
from resilio_hpc.report.chain.why import RunWhy, explain, why_object
from resilio_hpc.report.present import facts_of, parse_verdict, present
from resilio_hpc.report.status import parse_status


def event(at: float, kind: str, /, **fields: Any) -> Event:
    return Event(at, "7-n1", kind, fields)


BEGUN = [
    Event(0, "7-supervisor-main", "launch", {"job": "7", "nodes": ["n1", "n2"]}),
    event(1, "round", round=0, members=["n1", "n2"]),
    event(5, "first_step", round=0, step=1, restored=-1),
]
KILLED = event(50, "rank_failed", round=0, node="n2", rank=3, kind="signal", signal=9, message="killed by SIGKILL")
BUG = event(50, "rank_failed", round=0, node="n2", rank=3, kind="exit", exit_code=1, place="train.py:88",
            message="ValueError: nan", **{"class": "user_code"})  # fmt: skip
ECHO = event(50.2, "rank_failed", round=0, node="n1", rank=0, kind="exit", message="Connection reset", echo=True)
ORIGIN = event(50.4, "origin", round=0, node="n2", rank=3, primary=True, confidence=0.8, evidence="it came first")
ECHOES = event(50.4, "echoes", round=0, node="n2", rank=3, count=7, logs="/logs")
AGAIN = event(50.3, "decision", round=0, rung="restart_ranks", reason="the nodes are fine")
BACK = event(70, "recovered", round=1, kind="rank_exception", node="n2", rank=3, recovery_s=20.0, lost_steps=4)
GIVEN_UP = event(50.5, "decision", round=0, rung="stop", reason="it is no use")


def said(*more: Event, now: float = 100.0, stalled_s: float | None = None, **verdict: Any) -> RunWhy:
    events = sorted([*BEGUN, *more], key=lambda one: one.time)
    agents = {"n1": {"step": 40, "step_s": 0.5, "silent_s": 0.1}, "n2": {"step": 40, "step_s": 0.5, "silent_s": 0.1}}
    status = {"time": now - 1, "phase": "running", "agents": agents, "stalled_s": stalled_s,
              "members": [{"node": "n1"}, {"node": "n2"}]}  # fmt: skip
    ended = parse_verdict({"job": "7", "time": now - 5, **verdict} if verdict else None)
    state = present(facts_of(events), 0.0, parse_status(status), ended, now)
    return explain(Path("/run"), "abc", events, state, now)


def test_a_run_that_is_fine() -> None:
    found = said()
    assert found.text == "The run trains at step 40, 2 steps/s. No fault of a rank or a node is on record."
    assert (found.broke, found.to_do) == (None, "")


def test_why_steps_are_done_again_is_said() -> None:
    own = "no other rank is known to hold its tensors"
    lost = event(50.6, "last_step", node="n2", round=0, step=-1, saved=0, made=[], of=2, why=own)
    assert f"with 4 steps done again ({own})." in said(KILLED, lost, AGAIN, BACK).text
    none = Event(BACK.time, BACK.writer, BACK.kind, BACK.fields | {"lost_steps": 0})
    assert own not in said(KILLED, lost, AGAIN, none).text


def test_the_step_of_a_run_that_ended_before_its_planned_steps_is_not_made_up() -> None:
    planned, saved = event(12.0, "steps_planned", round=0, start=0, total=1000), event(40.0, "committed", step=60)
    early = said(planned, saved, verdict="completed", reason="every rank exited with 0").text
    assert "at step" not in early and "newest checkpoint is of step 60; 1000 were planned" in early
    whole = said(planned, event(40.0, "committed", step=1000), verdict="completed", reason="").text
    assert whole.startswith("The run is complete at step 1000")


@pytest.mark.parametrize(("step", "last"), [(48, 48), (-1, 40), ("x", 40)])
def test_the_step_at_the_end_is_the_furthest_that_is_known(step: object, last: int) -> None:
    found = said(KILLED, GIVEN_UP, verdict="no_progress", reason="", exit_code=1, step=step)  # the status knows of 40
    assert found.text.startswith(f"The run ended at step {last} with the verdict no progress")


def test_a_fault_that_was_overcome() -> None:
    found = said(BUG, ECHO, ORIGIN, ECHOES, AGAIN, BACK)
    assert found.text.startswith("The run trains at step 40")
    for words in (
        "rank 3 on n2 ended with exit code 1 at train.py:88: ValueError: nan.",
        "This is the root cause, 80% sure: it came first.",
        "Folded as its echoes: the errors of 7 other ranks",
        "It is an error of the program.",
        "decided to restart the ranks where they were; training went on by itself 20.0 s after the fault, with 4 steps",
    ):
        assert words in found.text
    assert found.to_do == ""  # the run goes on


def test_a_run_that_ended_for_good_says_why_and_what_to_do() -> None:
    verdict = {"verdict": "no_progress", "reason": "it is no use", "exit_code": 1, "committed": -1}
    later = event(90, "rank_failed", **{**BUG.fields, "round": 1})
    stop = event(90.5, "decision", round=1, rung="stop", reason="it is no use")
    begun = event(60, "first_step", round=1, step=1, restored=-1)
    found = said(BUG, ORIGIN, AGAIN, begun, BACK, later, stop, **verdict)
    assert found.text.startswith("The run ended at step 40 with the verdict no progress: it is no use, 5.00 s ago.")
    assert "The same had happened 1 time before." in found.text
    assert "decided to give up; training did not go on. The last durable step: none." in found.text
    assert found.text.endswith("To do: mend the program where the traceback points.")
    assert found.again == 1


def test_an_origin_that_is_told_under_the_next_rounds_number_counts() -> None:
    late = event(51, "origin", **{**ORIGIN.fields, "round": 1, "ends": 3})
    found = said(BUG, ECHO, GIVEN_UP, late, verdict="no_progress", reason="", exit_code=1)
    assert "80% sure" in found.text and found.broke is not None and found.broke.ends == 3


def test_several_ends_without_a_judgement_are_not_called_the_root_cause() -> None:
    found = said(BUG, ECHO, AGAIN)
    assert "It is the first of 2 ends on record; no root cause was judged." in found.text
    assert "that is under way" in found.text


def test_a_recovery_that_is_under_way_after_a_kill() -> None:
    found = said(KILLED, AGAIN)
    assert "rank 3 on n2 was killed by SIGKILL" in found.text
    assert "only end of that moment on record" in found.text and "that is under way" in found.text


def test_an_errors_own_words_are_left_as_they_are() -> None:
    message = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed."
    loader = event(
        50, "rank_failed", round=0, node="n2", rank=3, kind="exit", exit_code=1, signal=None, message=message
    )
    assert f"with exit code 1: {message}" in said(loader, AGAIN).text


def test_a_standstill_now_comes_first_with_what_the_agents_see() -> None:
    hang = event(90, "hang", round=0, kind="absent", ranks=[3], nodes=["n2"], evidence="rank 3 did not come",
                 certain=True, moves=False, acted=False)  # fmt: skip
    found = said(event(80, "stalled", round=0, step=40, silent_s=9.0, limit_s=5.0, nodes=["n2"]), hang, stalled_s=19.0)
    assert found.text.startswith("The run stands still at step 40: no step was done for 19.0 s.")
    assert "rank 3" in found.text.split(".")[2] + found.text.split(".")[3]


def test_a_run_of_which_nothing_is_heard() -> None:
    found = said(now=5_000.0, verdict="", reason="")
    assert found.text.startswith("The run trains")  # the status is young
    silent = explain(Path("/run"), "abc", BEGUN, present(facts_of(BEGUN), 0.0, None, None, 500.0), 500.0)
    assert silent.text.startswith("Nothing was heard of the run for 8 min 15 s; look whether job 7 still runs.")


def test_a_job_that_another_one_carries_on_did_not_fail() -> None:
    next_job = event(2, "successor", job="8", link=2, acted=True)
    lost = event(60, "node_lost", node="n2", silent_s=5.0)
    decided = event(60.1, "decision", round=0, rung="next_job", reason="too few nodes")
    found = said(next_job, lost, decided, verdict="needs_new_job", reason="too few nodes", exit_code=75)
    assert "Job 8 carries it on by itself." in found.text and "that is under way" in found.text
    assert found.to_do == ""


def test_nothing_was_written_yet() -> None:
    state = present(facts_of([]), 90.0, None, None, 91.0)
    assert explain(Path("/run"), "abc", [], state, 91.0).text.startswith("The run is starting")


@pytest.mark.parametrize("more", [(), (BUG, ECHO, ORIGIN, ECHOES, AGAIN, BACK)])
def test_for_programs(more: tuple[Event, ...]) -> None:
    found = json.loads(json.dumps(why_object(said(*more))))
    assert (found["v"], found["state"], found["step"], found["why"] != "") == (1, "running", 40, True)
    assert (found["broke"] is None) == (not more)
    if more:
        assert (found["broke"]["echoes"], found["broke"]["lost_steps"]) == (7, 4)
