"""The last words of a launch: what happened, the first failure, its cost, what to do next."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.json_fields import Fields
from resilio_hpc.core.ledger import Event
from resilio_hpc.launch.rundir.final_report import (
    ENDINGS,
    MAX_TRACEBACK_LINES,
    Losses,
    failure_lines,
    losses,
    verdict_lines,
)

RUN = Path("/runs/r1")
SEE = "see: resilio ledger /runs/r1 for what happened, /runs/r1/logs for the ranks' output"
RESUME = "start it again with --run-dir /runs/r1; it carries on from step 40"
ANEW = "start it again with --run-dir /runs/r1; it begins anew, since no checkpoint is committed"

# verdict, its reason, committed step, successor → the lines
ENDS: list[tuple[str, str, int | None, str | None, list[str]]] = [
    ("completed", "every rank exited with 0", 40, None, ["completed: every rank exited with 0"]),
    ("time_limit", "near", 40, None, ["stopped before the time limit: near", f"next: {RESUME}", SEE]),
    (
        "time_limit",
        "near",
        40,
        "812",
        ["stopped before the time limit: near", "next: job 812 carries on from step 40, by itself", SEE],
    ),
    ("time_limit", "near", -1, None, ["stopped before the time limit: near", f"next: {ANEW}", SEE]),
    ("needs_new_job", "1 node left", 40, None, ["this job cannot go on: 1 node left", f"next: {RESUME}", SEE]),
    ("terminated", "SIGTERM", 40, None, ["terminated: SIGTERM", f"next: {RESUME}", SEE]),
    ("interrupted", "Ctrl-C", 40, None, ["interrupted: Ctrl-C", f"next: {RESUME}", SEE]),
    ("cancelled", "job 7 was cancelled", 40, None, ["cancelled: job 7 was cancelled", f"next: {RESUME}", SEE]),
    (
        "failed",
        "--mode observe",
        -1,
        None,
        [
            "failed: --mode observe",
            f"next: put the first failure right, then {ANEW}",
            SEE,
        ],
    ),
    (
        "no_progress",
        "3 restarts",
        40,
        None,
        ["gave up: 3 restarts", f"next: put the first failure right, then {RESUME}", SEE],
    ),
    (
        "not_enough_nodes",
        "1 usable node",
        40,
        None,
        [
            "not enough nodes: 1 usable node",
            f"next: lower --nnodes MIN, add --spares, or ask for other nodes; then {RESUME}",
            SEE,
        ],
    ),
    (
        "agents_lost",
        "",
        None,
        None,
        [
            "the agents were lost",
            "next: find out why they ended (the lines above; with --view /runs/r1/console.log), then start it again "
            "with --run-dir /runs/r1; it carries on from the newest committed checkpoint",
            SEE,
        ],
    ),
    ("of a later version", "?", 40, None, ["ended: ?", "next: see resilio ledger /runs/r1", SEE]),
]


@pytest.mark.parametrize(("verdict", "reason", "committed", "successor", "lines"), ENDS)
def test_every_verdict_says_what_to_do_next(
    verdict: str, reason: str, committed: int | None, successor: str | None, lines: list[str]
) -> None:
    data = {"verdict": verdict, "reason": reason, "exit_code": 1, "committed": committed}
    assert verdict_lines(RUN, data, successor) == lines


def test_the_table_has_every_verdict() -> None:
    assert {verdict for verdict, *_ in ENDS} >= set(ENDINGS)


def test_the_cost_of_failures_is_one_line() -> None:
    lines = verdict_lines(RUN, {"verdict": "completed"}, None, Losses(2, 12.34, 7))
    assert lines[1:] == ["cost of failures: 2 restarts, 12.3 s until training went on, 7 steps done again"]


def test_losses_are_those_of_this_job() -> None:
    def recovered(writer: str, seconds: Any, steps: Any) -> Event:
        return Event(1.0, writer, "recovered", {"recovery_s": seconds, "lost_steps": steps})

    starts = [Event(1.0, "7-n1", "start", {"round": number}) for number in range(3)]
    events = [*starts, recovered("7-n1", 1.5, 2), recovered("7-n1", "x", None), recovered("71-n1", 9.0, 9)]
    assert losses(events, "7") == Losses(2, 1.5, 2)
    assert losses(events).time_s == 10.5
    assert losses([], "7") == Losses(0, 0.0, 0)
    grown = [*events, Event(1.0, "7-n1", "regroup", {"reason": "more nodes are here"})]
    assert losses(grown, "7").restarts == 1, "a planned change of the nodes is no failure's cost"


FAILURE = {"node": "n2", "rank": 3, "local_rank": 1, "time": 1e9, "signal": None, "exit_code": 1}


def test_the_first_failure_is_told_in_one_place() -> None:
    told = failure_lines(
        Fields(FAILURE | {"message": "ValueError: boom", "traceback": "Traceback\n  f()\nValueError: boom\n"})
    )
    assert re.fullmatch(
        r"first failure: rank 3 \(local rank 1\) on n2 at 2001-09-\d\d \d\d:\d\d:40: exit code 1", told[0]
    )
    assert told[1:] == ["    Traceback", "      f()", "    ValueError: boom"]


def test_a_signal_is_named_and_its_message_told() -> None:
    told = failure_lines(Fields(FAILURE | {"signal": 9, "exit_code": None, "message": "out of memory?"}))
    assert told[0].endswith(": killed by SIGKILL")
    assert told[1:] == ["    out of memory?"]


def test_a_message_that_tells_the_end_is_not_told_twice() -> None:
    killed = {"signal": 9, "exit_code": None, "message": "killed by SIGKILL (often by …)\nsecond line"}
    told = failure_lines(Fields(FAILURE | killed))
    assert told[0].endswith(":40: killed by SIGKILL (often by …)")
    assert told[1:] == ["    second line"]


def test_a_long_traceback_is_cut_at_its_beginning() -> None:
    text = "\n".join(f"line {number}" for number in range(MAX_TRACEBACK_LINES + 5))
    told = failure_lines(Fields(FAILURE | {"traceback": text}))
    assert told[1:3] == ["    … 5 lines before", "    line 5"]
    assert len(told) == MAX_TRACEBACK_LINES + 2


@pytest.mark.parametrize("value", [None, "x", 10**400, float("nan"), [], {}, {"time": 1e300}, True])
def test_a_damaged_verdict_still_has_last_words(value: object) -> None:
    names = ("verdict", "reason", "committed", "restarts", "first_failure")
    assert verdict_lines(RUN, dict.fromkeys(names, value))
    assert failure_lines(Fields(dict.fromkeys(FAILURE, value)))
