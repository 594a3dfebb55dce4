"""Whose drain is it, what may be written, when is it too many: tables."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc.core.errors import UsageError
from resilio_hpc.slurm.client.model import Node
from resilio_hpc.slurm.client.states import node_state
from resilio_hpc.slurm.client.update_count import came_alone, parse_update_count
from resilio_hpc.slurm.drain.drain import (
    PROLOG_ERROR,
    Action,
    decide_drain,
    decide_slurms_own,
    decide_undrain,
    slurm_reasons,
)
from resilio_hpc.slurm.drain.policy import DrainPolicy, drain_policy
from resilio_hpc.slurm.drain.reason import BY_HAND, Finding, disowned_reason, read_reason, write_reason
from resilio_hpc.slurm.drain.storm_breaker import no_room, one_too_many

XID = Finding("gpu.xid", "Xid 79 on GPU 3")
DISK = Finding("disk.full", "/ is full")
OURS = write_reason([XID])
BOTH = write_reason([XID, DISK])
EDITED = OURS.replace("GPU 3", "GPU 3, ticket 12, bob")


def node(state: str, reason: str = "", by: str = "root") -> Node:
    return Node("n1", node_state([state]), reason=reason, reason_by=by if reason else "")


@pytest.mark.parametrize(
    ("seen", "action", "why"),
    [
        (node("idle"), Action.DRAIN, "IDLE"),
        (node("mixed+planned"), Action.DRAIN, "MIXED"),
        (node("idle", "a note"), Action.DRAIN, "IDLE"),
        (node("down", ""), Action.DRAIN, "DOWN"),
        (node("down+not_responding", "Not responding", "slurm"), Action.DRAIN, "DOWN"),
        (node("idle+drain", OURS), Action.NOTHING, "by us already"),
        (node("idle+drain", write_reason([DISK])), Action.REWORD, "also for gpu.xid"),
        (node("idle+drain", "bob: disk"), Action.LEAVE, "by root: bob: disk"),
        (node("idle+drain", EDITED), Action.LEAVE, "bob"),
        (node("idle+drain", disowned_reason("x")), Action.LEAVE, "look before"),
        (node("idle+drain", "Kill task failed"), Action.LEAVE, "by Slurm"),
        (node("idle+drain", ""), Action.LEAVE, "without a reason"),
        (node("down", "bob: disk"), Action.LEAVE, "DOWN already by root"),
        (node("down", "Node unexpectedly rebooted", "slurm"), Action.LEAVE, "by Slurm"),
        (node("mixed+fail", "bob: failing"), Action.LEAVE, "FAIL"),
        (node("future"), Action.LEAVE, "FUTURE"),
        (node("sparkling"), Action.UNKNOWN, "not understood"),
        (node("drain", OURS), Action.UNKNOWN, "not understood"),
        (None, Action.UNKNOWN, "no such node"),
    ],
)
def test_what_may_be_drained(seen: Node | None, action: Action, why: str) -> None:
    decision = decide_drain(seen, XID)
    assert (decision.action, why in decision.why) == (action, True), decision
    assert (read_reason(decision.reason) is not None) == decision.writes


@pytest.mark.parametrize(
    ("seen", "check", "passes", "action", "rest"),
    [
        (node("idle+drain", OURS), "gpu.xid", 3, Action.UNDRAIN, None),
        (node("idle+drain", OURS), None, 3, Action.UNDRAIN, None),
        (node("idle+drain", OURS), "gpu.xid", 2, Action.NOTHING, None),
        (node("idle+drain", OURS), "disk.full", 9, Action.NOTHING, None),
        (node("idle+drain", BOTH), "gpu.xid", 3, Action.REWORD, (DISK,)),
        (node("idle+drain", BOTH), None, 3, Action.UNDRAIN, None),
        (node("down+drain", OURS), None, 3, Action.UNDRAIN, None),
        (node("idle+drain", EDITED), None, 9, Action.LEAVE, None),
        (node("idle+drain", "bob: disk"), None, 9, Action.LEAVE, None),
        (node("idle+drain", "Kill task failed"), None, 9, Action.LEAVE, None),
        (node("idle+drain", disowned_reason(OURS)), None, 9, Action.LEAVE, None),
        (node("idle", OURS), None, 9, Action.NOTHING, None),
        (node("down", "bob"), None, 9, Action.NOTHING, None),
        (node("sparkling+drain", OURS), None, 9, Action.UNKNOWN, None),
        (None, None, 9, Action.UNKNOWN, None),
    ],
)
def test_what_may_be_undrained(
    seen: Node | None, check: str | None, passes: int, action: Action, rest: tuple[Finding, ...] | None
) -> None:
    decision = decide_undrain(seen, check, passes, passes_needed=3)
    assert decision.action is action, decision
    assert read_reason(decision.reason) == rest


def test_of_slurms_own_drains_only_those_that_pass_are_offered() -> None:
    assert decide_slurms_own(node("idle+drain", "Kill task failed"), 3, 3).action is Action.UNDRAIN
    assert decide_slurms_own(node("idle+drain", "Kill task failed"), 2, 3).action is Action.NOTHING
    for seen in (node("idle+drain", "Prolog error"), node("idle+drain", OURS), node("idle"), node("idle+drain", "bob")):
        assert decide_slurms_own(seen, 9, 3).action is Action.LEAVE
    assert [row.begins for row in slurm_reasons() if row.offer] == ["Kill task failed"]
    assert [row.begins for row in slurm_reasons() if row.replaceable] == ["Not responding"]


def test_reasons_are_known_again_and_nobody_elses_are() -> None:
    assert read_reason(OURS) == (XID,)
    assert read_reason(BOTH) == (XID, DISK)
    for other in ("", "bob", EDITED, f"{OURS} ", f" {OURS}", OURS[:-1], "resilio:gpu.xid: x", "resilio: #123456"):
        assert read_reason(other) is None, other
    with pytest.raises(UsageError, match="Not A Check"):
        Finding("Not A Check", "x")


@given(st.lists(st.text(max_size=300), min_size=1, max_size=9))
def test_any_evidence_makes_a_reason_that_slurm_keeps_and_we_know_again(evidence: list[str]) -> None:
    findings = [Finding(f"check.{number}", text) for number, text in enumerate(evidence)]
    reason = write_reason(findings)
    found = read_reason(reason)
    assert found is not None
    assert [one.check for one in found] == [one.check for one in findings]
    assert reason.isprintable()
    assert '"' not in reason
    assert len(reason) < 900
    assert write_reason(found) == reason


def drained(name: str, at: int, partitions: tuple[str, ...] = ("main",), reason: str = OURS) -> Node:
    return Node(name, node_state(["idle+drain"]), partitions, reason=reason, reason_time=at)


def healthy(*names: str, partitions: tuple[str, ...] = ("main",)) -> list[Node]:
    return [Node(name, node_state(["idle"]), partitions) for name in names]


POLICY = DrainPolicy(share=0.1, at_least=2, window_s=600, passes=3)


def test_the_breaker_holds_when_a_share_of_a_partition_was_drained_lately() -> None:
    rest = healthy(*(f"m{number}" for number in range(28)))
    two = [drained("n1", 1000), drained("n2", 1100)]
    assert no_room([*two, *rest], "m0", 1200, POLICY) is None  # a tenth of 30: a third is allowed
    storm = no_room([*two, drained("n3", 1150), *rest], "m0", 1200, POLICY)
    assert storm is not None
    assert (storm.drained, storm.allowed, storm.total, storm.partition) == (3, 3, 31, "main")
    assert "3 of 31 nodes of partition main" in str(storm)
    assert no_room([*two, drained("n3", 1150), *rest], "m0", 1601, POLICY) is None  # n1's is too long ago
    assert no_room([*two, drained("n3", 1150, reason="bob"), *rest], "m0", 1200, POLICY) is None  # his are his affair
    assert no_room([*two, drained("n3", 9999), *rest], "m0", 1200, POLICY) is not None  # a clock ahead of ours
    assert no_room([*two, drained("n3", 1150), *rest], "n3", 1200, POLICY) is None  # itself is not counted twice


def test_each_partition_of_a_node_must_have_room() -> None:
    small = [*healthy("s1", "s2", partitions=("main", "small")), drained("s3", 1000, ("main", "small")),
             drained("s4", 1000, ("main", "small"))]  # fmt: skip
    rest = healthy(*(f"m{number}" for number in range(96)))
    storm = no_room([*small, *rest], "s1", 1100, POLICY)
    assert storm is not None
    assert storm.partition == "small"
    assert no_room([*small, *rest], "m1", 1100, POLICY) is None
    alone = [Node(name, node_state(["idle+drain"]), reason=OURS, reason_time=1000) for name in ("x1", "x2", "x3")]
    assert no_room([*alone, *rest], "x4", 1100, POLICY) is not None  # those that are in no partition, together


def test_of_those_who_drained_at_the_same_time_the_later_ones_were_too_many() -> None:
    nodes = [drained("n1", 1000), drained("n2", 1001), drained("n3", 1001), drained("n4", 1002)]
    held = [name for name in ("n1", "n2", "n3", "n4") if one_too_many(nodes, name, 1003, POLICY)]
    assert held == ["n3", "n4"]


EACH = msgspec.structs.replace(POLICY, check_share=0.1)


def test_a_check_that_holds_a_share_of_the_nodes_only_warns_on_others_whenever_it_began() -> None:
    rest = healthy(*(f"m{number}" for number in range(28)))
    held = [drained("n1", 10), drained("n2", 2000), drained("n3", 9000, reason=BOTH)]
    storm = no_room([*held, *rest], "m0", 10_000, EACH, "gpu.xid")
    assert storm is not None and (storm.check, storm.drained, storm.allowed) == ("gpu.xid", 3, 3)
    assert "3 of 31 nodes of partition main are drained for gpu.xid, 3 are allowed" in str(storm)
    assert no_room([*held, *rest], "m0", 10_000, EACH, "disk.full") is None  # one node is held for that
    assert no_room([*held[:2], *rest], "m0", 10_000, EACH, "gpu.xid") is None
    theirs = drained("n3", 9000, reason=EDITED)  # a person has taken it up
    assert no_room([*held[:2], theirs, *rest], "m0", 10_000, EACH, "gpu.xid") is None
    assert no_room([*held, *rest], "n3", 10_000, EACH, "gpu.xid") is None  # itself is not counted twice
    disowned = drained("n3", 9000, reason=disowned_reason(BOTH.removeprefix("resilio:")))
    assert no_room([*held[:2], disowned, *rest], "m0", 10_000, EACH, "gpu.xid") is not None
    by_hand = [drained(f"n{n}", 10, reason=write_reason([Finding(BY_HAND, "new fans")])) for n in range(9)]
    assert no_room([*by_hand, *rest], "m0", 10_000, EACH, BY_HAND) is None  # a person's drains have many causes


def test_failed_prologs_of_a_share_of_the_nodes_leave_no_room_for_another() -> None:
    failed = [drained(f"n{number}", 10, reason="Prolog error") for number in range(3)]
    rest = healthy(*(f"m{number}" for number in range(27)))
    assert no_room([*failed, *rest], "m0", 10_000, EACH) is None  # long ago
    assert no_room([*failed, *rest], "m0", 10_000, EACH, PROLOG_ERROR) is not None


def test_of_nodes_that_are_held_for_a_check_in_one_second_all_name_the_same_as_too_many() -> None:
    nodes = [*(drained(f"n{number}", 1000) for number in (4, 1, 3, 2)), drained("n0", 1001)]
    late = [one.name for one in nodes if one_too_many(nodes, one.name, 9000, EACH, "gpu.xid")]
    assert sorted(late) == ["n0", "n3", "n4"]


def test_the_policy_is_a_file_and_its_mistakes_are_told(tmp_path: Path) -> None:
    assert drain_policy() == DrainPolicy(share=0.1, at_least=2, window_s=3600, passes=3, check_share=0.1)
    own = tmp_path / "policy.toml"
    own.write_text("share = 0.25\n")
    assert drain_policy(own) == DrainPolicy(share=0.25, at_least=2, window_s=3600, passes=3, check_share=0.1)
    for text in (
        "share = 2",
        "shares = 0.1",
        "share = 'a'",
        "passes = 0",
        "= 3",
        "window_s = -1",
        "check_share = 1.5",
        "check_at_least = -1",
    ):
        own.write_text(text)
        with pytest.raises(UsageError, match=r"policy\.toml"):
            drain_policy(own)
    with pytest.raises(UsageError, match="No such file"):
        drain_policy(tmp_path / "gone.toml")


def test_orders_are_counted_as_sdiag_prints_them() -> None:
    head = "Remote Procedure Call statistics by message type\n"
    line = "\tREQUEST_UPDATE_NODE                     ( 3002) count:17     ave_time:1324   total_time:1324\n"
    assert parse_update_count(head + line) == 17
    assert parse_update_count(head) == 0
    assert parse_update_count("") is None
    assert [came_alone(5, 6), came_alone(5, 7), came_alone(5, 5), came_alone(5, 1)] == [True, False, False, False]
    assert came_alone(None, 6)
    assert came_alone(5, None)
