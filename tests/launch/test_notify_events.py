"""Which of the controller's ledger entries somebody is told of."""

from __future__ import annotations

from typing import Any

import pytest

from resilio_hpc.launch.notify.events import SETTLE_S, Notice, NoticeMaker

ECHO = "RuntimeError: Connection closed by peer"
LATER = SETTLE_S + 0.01


def failed(
    rank: int, node: str, time: float, message: str = "", round: int = 0, **end: Any
) -> tuple[str, dict[str, Any]]:
    kind = "signal" if "signal" in end else "exit"
    fields = {"round": round, "node": node, "rank": rank, "local_rank": 0, "kind": kind, "time": time,
              "exit_code": None, "signal": None, "message": message, "traceback": "", **end}  # fmt: skip
    return "rank_failed", fields


ROUND = ("round", {"round": 0, "members": ["n1", "n2"], "world_size": 4})
RECOVERED = ("recovered", {"kind": "rank_killed", "node": "n2", "rank": 3, "round": 1, "recovery_s": 0.18,
                           "lost_steps": 0})  # fmt: skip


def told(*entries: tuple[str, dict[str, Any]], now: float = 100.0, until: float = LATER) -> list[Notice]:
    maker = NoticeMaker()
    for entry, fields in entries:
        maker.take(entry, fields, now)
    return maker.due(now + until)


def events(notices: list[Notice]) -> list[str]:
    return [notice.event for notice in notices]


def test_the_first_failure_of_an_incident_is_told_and_its_echoes_are_not() -> None:
    decision = ("decision", {"rung": "restart_ranks", "reason": "the nodes are fine", "acted": True})
    notices = told(
        ROUND, failed(0, "n1", 99.90, ECHO, exit_code=1), decision, failed(3, "n2", 99.95, signal=9),
        failed(1, "n1", 99.96, ECHO, exit_code=1),
    )  # fmt: skip
    assert events(notices) == ["failure"]
    (first,) = notices
    assert (first.rank, first.node, first.kind, first.signal, first.time) == (3, "n2", "signal", 9, 99.95)
    assert first.text == "rank 3 on n2 killed by SIGKILL; restart the ranks where they were"


def test_a_failure_waits_for_its_echoes_and_no_longer() -> None:
    assert told(ROUND, failed(3, "n2", 99.9, signal=9), until=SETTLE_S / 2) == []


def test_what_follows_until_training_goes_on_belongs_to_the_same_incident() -> None:
    maker = NoticeMaker()
    seen = []
    for (entry, fields), at in (
        (ROUND, 0.0), (failed(3, "n2", 1.0, signal=9), 1.0), (failed(2, "n2", 2.0, signal=9, round=1), 2.0),
        (RECOVERED, 3.0), (failed(1, "n1", 4.0, exit_code=1, round=1), 4.0),
    ):  # fmt: skip
        maker.take(entry, fields, at)
        seen += [(notice.event, notice.rank) for notice in maker.due(at + LATER)]
    assert seen == [("failure", 3), ("recovered", 3), ("failure", 1)]


def test_a_rank_that_starts_again_alone_is_told_with_what_is_done_and_so_is_the_next_one() -> None:
    maker, decision = NoticeMaker(), {"rung": "restart_rank", "reason": "rank 3; the other ranks go on", "acted": True}
    seen = []
    for rank, at in ((3, 1.0), (2, 5.0)):
        for entry, fields in (
            failed(rank, "n2", at, signal=9, alone=True), ("decision", decision), ("rank_restarted", {"rank": rank}),
        ):  # fmt: skip
            maker.take(entry, fields, at)
        seen += [notice.text for notice in maker.due(at)]
    assert seen == [f"rank {rank} on n2 killed by SIGKILL; start the failed rank again" for rank in (3, 2)]


def test_recovery_is_told_after_its_failure_however_fast_it_was() -> None:
    notices = told(ROUND, failed(3, "n2", 99.9, signal=9), RECOVERED, until=0.0)
    assert events(notices) == ["failure", "recovered"]
    assert notices[1].text == "recovered from a killed rank in 0.18 s; no step to do again"


def test_an_echo_that_recovery_has_overtaken_is_not_told_and_hides_nothing() -> None:
    second = ("round", {"round": 1, "members": ["n1", "n2"], "world_size": 4})
    late = failed(0, "n1", 99.0, ECHO, exit_code=1, round=0)
    notices = told(ROUND, second, RECOVERED, late, failed(2, "n2", 99.5, exit_code=7, round=1))
    assert [(notice.event, notice.rank) for notice in notices] == [("recovered", 3), ("failure", 2)]


def test_a_lost_node_is_told_and_the_errors_of_the_others_are_its_echoes() -> None:
    lost = ("node_lost", {"node": "n2", "silent_s": 5.1})
    notices = told(ROUND, lost, failed(0, "n1", 99.9, "RuntimeError: anything", exit_code=1))
    assert [(notice.event, notice.node) for notice in notices] == [("node_lost", "n2")]
    assert notices[0].text == "node n2 lost: silent for 5.10 s"


def test_a_spares_loss_hides_no_later_failure() -> None:
    notices = told(ROUND, ("node_lost", {"node": "n9", "silent_s": 5.1}), failed(0, "n1", 99.9, exit_code=1))
    assert events(notices) == ["node_lost", "failure"]


def joined(node: str) -> tuple[str, dict[str, Any]]:
    return "agent_joined", {"node": node, "incarnation": "ab"}


def test_the_nodes_of_the_start_are_not_told_but_later_ones_are() -> None:
    notices = told(joined("n1"), joined("n2"), joined("spare"), ROUND, joined("n2"), joined("spare"), joined("n7"))
    assert [(notice.event, notice.node) for notice in notices] == [("joined", "n7")]


def test_a_node_that_left_may_join_again() -> None:
    left = ("agent_left", {"node": "n2", "reason": "its own job ends"})
    without = ("round", {"round": 1, "members": ["n1"], "world_size": 2})
    notices = told(joined("n1"), joined("n2"), ROUND, left, without, joined("n2"))
    assert [(notice.event, notice.node) for notice in notices] == [("left", "n2"), ("joined", "n2")]


def test_checkpoints_that_fail_again_and_again_are_told_once_until_one_succeeds() -> None:
    bad = [("persist_failed", {"node": "n1", "step": step, "error": "No space left"}) for step in range(5)]
    good = ("committed", {"step": 60, "seconds": 1.0, "epoch": 1})
    notices = told(ROUND, *bad, good, *bad)
    assert events(notices) == ["checkpoint_failed"] * 2
    assert notices[0].text == "checkpoint of step 1 could not be written on n1: No space left"


def test_a_checkpoint_that_the_next_one_overtook_is_not_worth_telling() -> None:
    overtaken = [("persist_failed", {"node": node, "step": 5, "error": "overwritten"}) for node in ("n1", "n2")]
    good = ("committed", {"step": 10, "seconds": 1.0, "epoch": 1})
    assert told(ROUND, *overtaken, good, *overtaken) == []


def test_the_verdict_comes_last_and_names_the_first_failure() -> None:
    _, fields = failed(3, "n2", 99.9, "ValueError: nan", exit_code=1)
    verdict = ("verdict", {"verdict": "no_progress", "reason": "3 restarts", "first_failure": fields})
    notices = told(ROUND, ("rank_failed", fields), verdict, until=0.0)
    assert events(notices) == ["failure", "verdict"]
    assert (notices[1].verdict, notices[1].rank, notices[1].message) == ("no_progress", 3, "ValueError: nan")
    text = "no progress: 3 restarts; first failure: rank 3 on n2 ended with exit code 1: ValueError: nan"
    assert notices[1].text == text


def test_a_decision_that_the_mode_forbids_is_told_as_such() -> None:
    decision = ("decision", {"rung": "restart_ranks", "reason": "", "acted": False})
    (notice,) = told(ROUND, failed(3, "n2", 99.9, signal=9), decision)
    assert notice.text.endswith("; would have been: restart the ranks where they were")


def test_a_controller_that_stepped_down_forgets_what_it_saw() -> None:
    notices = told(joined("n1"), ROUND, failed(3, "n2", 99.9, signal=9), ("stepped_down", {"epoch": 1}), joined("n1"))
    assert notices == []


@pytest.mark.parametrize("entry", ["round", "rank_failed", "slow_start", "decision", "node_lost", "agent_left",
                                   "agent_joined", "first_step", "recovered", "persist_failed", "save_overdue",
                                   "verdict"])  # fmt: skip
def test_entries_with_missing_fields_break_nothing(entry: str) -> None:
    told((entry, {}), (entry, {"node": 7, "rank": "x", "members": 3, "first_failure": []}))


def test_a_hang_that_is_not_acted_on_is_told_and_one_that_is_comes_as_a_failure() -> None:
    maker = NoticeMaker()
    hang = {"round": 0, "kind": "absent", "ranks": [3], "nodes": ["n2"], "evidence": "rank 3 waits", "moves": False}
    maker.take("hang", {**hang, "acted": False}, 10.0)
    maker.take("hang", {**hang, "acted": False, "moves": True}, 11.0)
    maker.take("hang", {**hang, "acted": True}, 12.0)
    assert [(notice.event, notice.node, notice.kind) for notice in maker.due(12.0)] == [("failure", "n2", "hang")]


def test_memory_that_is_nearly_full_is_told() -> None:
    alert = ("memory_alert", {"level": 2, "node": "n2", "text": "memory: 97 % of 1 TiB in use", "count": 4})
    (notice,) = told(ROUND, alert)
    assert (notice.event, notice.node) == ("memory", "n2")
    assert notice.text == "memory critical on n2: memory: 97 % of 1 TiB in use; and on 3 more nodes"
