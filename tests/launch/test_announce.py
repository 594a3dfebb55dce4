"""What the console says about ledger entries: one line each, or nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest

from resilio_hpc.events.event_text import KINDS, words
from resilio_hpc.launch.process.announce import announcement, stamped
from resilio_hpc.launch.rundir.final_report import ENDINGS
from tests.support.environments import ROOT

FAILED = {"rank": 3, "node": "n2", "signal": None, "exit_code": None}

LINES: list[tuple[str, dict[str, Any], str]] = [
    ("round", {"round": 0, "members": ["n1"], "world_size": 1}, "round 0: 1 rank on n1"),
    (
        "round",
        {"round": 2, "members": [f"n{i}" for i in range(9)], "world_size": 72},
        "round 2: 72 ranks on n0, n1, n2, n3 and 5 more",
    ),
    ("start", {"round": 1, "restore": "memory:40"}, "round 1: ranks start, restoring step 40 from memory"),
    (
        "start",
        {"round": 1, "restore": "committed:40"},
        "round 1: ranks start, restoring step 40 from the committed checkpoint",
    ),
    ("start", {"round": 0, "restore": ""}, ""),
    ("rank_failed", FAILED | {"signal": 9}, "rank 3 on n2 killed by SIGKILL"),
    (
        "rank_failed",
        FAILED | {"signal": 11, "message": "killed by SIGSEGV (a crash in native code)"},
        "rank 3 on n2 killed by SIGSEGV (a crash in native code)",
    ),
    (
        "rank_failed",
        FAILED | {"signal": 6, "message": "RuntimeError: CUDA error\nmore"},
        "rank 3 on n2 killed by SIGABRT: RuntimeError: CUDA error",
    ),
    ("rank_failed", FAILED | {"exit_code": 1, "message": "Connection reset by peer", "echo": True}, ""),
    (
        "rank_failed",
        FAILED | {"exit_code": 1, "message": "Connection reset by peer", "echo": True, "alone": True},
        "rank 3 on n2 ended with exit code 1: Connection reset by peer",
    ),
    (
        "decision",
        {"rung": "restart_rank", "reason": "rank 3; the other ranks go on"},
        "decision: start the failed rank again (rank 3; the other ranks go on)",
    ),
    (
        "restarts_all",
        {"round": 0, "reason": "all 4 ranks failed"},
        "the whole round starts again, in spite of --restart-policy failed: all 4 ranks failed",
    ),
    (
        "rank_failed",
        FAILED | {"exit_code": 1, "message": "ValueError: boom"},
        "rank 3 on n2 ended with exit code 1: ValueError: boom",
    ),
    (
        "rank_failed",
        FAILED | {"exit_code": 2, "message": "failed (wrong arguments), exit code 2"},
        "rank 3 on n2 failed (wrong arguments), exit code 2",
    ),
    (
        "rank_failed",
        FAILED | {"kind": "spawner_lost", "message": "it was killed"},
        "rank 3 on n2 is lost: it was killed",
    ),
    ("node_lost", {"node": "n2", "silent_s": 5.04}, "node n2 lost: silent for 5.04 s"),
    (
        "decision",
        {"rung": "replace_node", "reason": "n2 lost, a spare takes its place"},
        "decision: let a spare node take over (n2 lost, a spare takes its place)",
    ),
    (
        "recovered",
        {"kind": "rank_killed", "recovery_s": 0.0704, "lost_steps": None},
        "recovered from a killed rank in 0.07 s",
    ),
    (
        "recovered",
        {"kind": "node_lost", "recovery_s": 61.2, "lost_steps": 1},
        "recovered from the loss of a node in 61.2 s; 1 step to do again",
    ),
    (
        "stopping",
        {"reason": "time_limit", "step": 7},
        "stopping at the next step that all ranks agree on: time limit",
    ),
    (
        "persist_failed",
        {"node": "n2", "step": 40, "error": "No space left on device"},
        "checkpoint of step 40 could not be written on n2: No space left on device",
    ),
    (
        "save_overdue",
        {"step": 40, "waited_s": 61.0, "nodes": ["n2"]},
        "checkpoint of step 40 is on its way to disk for 61.0 s, n2 still at it: is that file system slow, or does it "
        "hang? Training goes on",
    ),
    ("slow_start", {"round": 1, "waited_s": 300.0}, "round 1 did not come up within 5 min 00 s: once more"),
    ("committed", {"step": 40}, ""),
    ("ranks_started", {"node": "n1"}, ""),
    ("an event of a later version", {"x": 1}, ""),
]


@pytest.mark.parametrize(("kind", "fields", "line"), LINES)
def test_announcements(kind: str, fields: dict[str, Any], line: str) -> None:
    assert announcement(kind, fields) == line


def test_every_line_has_the_time_of_day() -> None:
    assert re.fullmatch(r"\[resilio\] \d\d:\d\d:\d\d round 0", stamped("round 0"))


def test_every_kind_that_the_launcher_records_has_words_and_a_row_in_the_documentation() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "resilio_hpc" / "launch").rglob("*.py"))
    entry = (
        r"(?:ledger\.append|\bRecord|\b_?record\)?|\b_write|\.tell)\(\s*\"([a-z_]+)\"(?: if [^\"]* else \"([a-z_]+)\")?"
    )
    recorded = {kind for found in re.findall(entry, sources) for kind in found if kind}
    recorded |= set(re.findall(r"yield \"([a-z_]+)\", {", sources))  # of workers/rank_records
    documented = set(re.findall(r"^\| `([a-z_]+)` \|", (ROOT / "docs" / "ledger.md").read_text(), re.MULTILINE))
    assert len(recorded) > 30
    assert recorded == KINDS, "give a new event words in events/event_text.py and a row in docs/ledger.md"
    assert recorded <= documented
    assert documented - recorded == {
        *ENDINGS,
        "superseded",
        "secret",
        "stdin",
    }  # a job that is superseded writes no verdict


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(
    "value", [None, "", "\x1b[2J\u202etext", 10**400, -1, 1e308, float("nan"), [], ["a", 3], {"a": {}}, True]
)
def test_no_field_can_break_the_words_or_the_terminal(kind: str, value: object) -> None:
    names = "node round signal exit_code seconds silent_s members pids reason restore committed recovery_s lost_steps"
    others = "kind rung message step restored rank world_size error job link"
    line = words(kind, dict.fromkeys([*names.split(), *others.split()], value))
    assert line.isprintable() and len(line) <= 300
