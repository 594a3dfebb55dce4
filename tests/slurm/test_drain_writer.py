"""Draining, from the comparison to the audit log, with a model of slurmctld; with a real one: test_client_on_slurm."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resilio_hpc.core.errors import CommandError
from resilio_hpc.core.process import Completed
from resilio_hpc.slurm.client.command_client import CommandClient
from resilio_hpc.slurm.drain.policy import DrainPolicy
from resilio_hpc.slurm.drain.reason import Finding, read_reason, write_reason
from resilio_hpc.slurm.drain.writer import DRY_RUN, OBSERVE, DrainWriter
from resilio_hpc.slurm.orders.audit import AuditEntry, AuditLog
from tests.support.slurm.fake_slurmctld import FakeNode, FakeSlurmctld

XID = Finding("gpu.xid", "Xid 79 on GPU 3")
POLICY = DrainPolicy(share=0.1, at_least=2, window_s=600, passes=3)


def cluster(*names: str) -> FakeSlurmctld:
    return FakeSlurmctld({name: FakeNode() for name in names or ("n1", "n2", "n3", "n4")})


def writer(slurm: FakeSlurmctld, log: Path | None = None, **options: Any) -> DrainWriter:
    return DrainWriter(
        CommandClient(slurm), POLICY, AuditLog(log), clock=lambda: slurm.now, sleep=lambda seconds: None, **options
    )


def entries(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_drain_leaves_its_reason_and_its_trace(tmp_path: Path) -> None:
    slurm, log = cluster(), tmp_path / "new" / "drain.jsonl"
    drainer = writer(slurm, log)
    assert drainer.drain("n1", XID).result == "drained"
    assert read_reason(slurm.nodes["n1"].reason) == (XID,)
    assert drainer.drain("n1", XID).result == "nothing"
    assert drainer.drain("n1", Finding("ib.link", "down")).result == "reworded"
    assert drainer.undrain("n1", "gpu.xid", passes=2).result == "nothing"
    assert drainer.undrain("n1", "gpu.xid", passes=3).result == "reworded"
    assert slurm.nodes["n1"].drain
    assert drainer.undrain("n1").result == "undrained"
    assert not slurm.nodes["n1"].drain
    steps = [(entry["step"], entry["result"]) for entry in entries(log)]
    assert steps == [
        ("intent", "drain"), ("outcome", "drained"), ("intent", "reword"), ("outcome", "reworded"),
        ("intent", "reword"), ("outcome", "reworded"), ("intent", "undrain"), ("outcome", "undrained"),
    ]  # fmt: skip
    first, done = entries(log)[:2]
    assert first["reason_written"] == done["reason_after"] == write_reason([XID])
    assert (first["state_before"], done["state_after"], done["evidence"]) == ("IDLE", "IDLE+DRAIN", XID.evidence)
    assert done["host"]
    assert done["pid"]


@pytest.mark.parametrize("mode", [OBSERVE, DRY_RUN])
def test_nothing_is_ordered_in_a_dry_run_or_observing(mode: str, tmp_path: Path) -> None:
    slurm, log = cluster(), tmp_path / "drain.jsonl"
    drainer = writer(slurm, log, mode=mode)
    slurm.nodes["n2"] = FakeNode(drain=True, reason=write_reason([XID]))
    assert drainer.drain("n1", XID).result == "would-act"
    assert drainer.undrain("n2").result == "would-act"
    assert slurm.orders == []
    assert [entry["mode"] for entry in entries(log)] == [mode, mode]


def test_somebody_elses_drain_is_neither_overwritten_nor_ended(tmp_path: Path) -> None:
    slurm = cluster()
    slurm.nodes["n1"] = FakeNode(drain=True, reason="bob: disk")
    assert writer(slurm).drain("n1", XID).result == "left"
    assert writer(slurm).undrain("n1").result == "left"
    assert writer(slurm).resume_slurms_own("n1").result == "left"
    assert slurm.orders == []


def test_what_slurm_drained_itself_is_offered_and_a_person_takes_it_up() -> None:
    slurm = cluster()
    slurm.nodes["n1"] = FakeNode(drain=True, reason="Kill task failed")
    assert writer(slurm).recheck("n1", passes=2).result == "nothing"
    offer = writer(slurm).recheck("n1", passes=3)
    assert (offer.result, "resilio undrain --kill-task-failed n1" in offer.why) == ("offered", True)
    assert slurm.orders == []
    assert writer(slurm).resume_slurms_own("n1").result == "undrained"
    assert not slurm.nodes["n1"].drain


def test_a_storm_stops_draining(tmp_path: Path) -> None:
    slurm, log = cluster(), tmp_path / "drain.jsonl"
    results = [writer(slurm, log).drain(name, XID).result for name in slurm.nodes]
    assert results == ["drained", "drained", "storm", "storm"]
    assert [node.drain for node in slurm.nodes.values()] == [True, True, False, False]
    assert entries(log)[-1]["result"] == "storm"
    assert writer(slurm, breaker=False).drain("n3", XID).result == "drained"
    slurm.now += 601
    assert writer(slurm).drain("n4", XID).result == "drained"


def test_of_two_who_drain_at_the_same_time_the_one_too_many_takes_its_own_back() -> None:
    slurm = cluster()
    slurm.update(["NodeName=n1", "State=DRAIN", f"Reason={write_reason([XID])}"])
    slurm.now += 1

    def the_other(argv: Sequence[str]) -> None:
        if argv[:2] == ["scontrol", "update"]:  # it has looked for room, as we have, and now both write
            slurm.between = lambda argv: None
            slurm.update(["NodeName=n2", "State=DRAIN", f"Reason={write_reason([XID])}"])

    slurm.between = the_other
    outcome = writer(slurm).drain("n3", XID)
    assert (outcome.result, "taken back" in outcome.why) == ("storm", True)
    assert [name for name, node in slurm.nodes.items() if node.drain] == ["n1", "n2"]


ONE_CHECK = msgspec.structs.replace(POLICY, share=1.0, check_share=0.1)


def drain_each(slurm: FakeSlurmctld, names: Sequence[str], finding: Finding) -> list[str]:
    drainer = DrainWriter(CommandClient(slurm), ONE_CHECK, AuditLog(None), clock=slurm.time, sleep=slurm.sleep)
    return [drainer.drain(name, finding).result for name in names]


def test_a_check_that_fails_everywhere_drains_a_few_nodes_and_no_more_however_long_it_fails() -> None:
    slurm = cluster(*(f"n{number}" for number in range(30)))
    for _ in range(5):
        results = drain_each(slurm, list(slurm.nodes), XID)
        slurm.now += 7200
    assert results == ["nothing"] * 3 + ["shared"] * 27
    assert drain_each(slurm, ["n9"], Finding("disk-errors", "sdb")) == ["drained"]
    slurm.nodes["n0"].reason = "bob: RMA 1234"  # a person took it up: there is room for one more
    assert drain_each(slurm, ["n7", "n8"], XID) == ["drained", "shared"]


def test_nodes_that_drain_in_the_same_second_agree_within_minutes_on_who_was_first() -> None:
    slurm = cluster(*(f"n{number}" for number in range(30)))
    for name in ("n4", "n2", "n3", "n1"):  # each has looked before the next one wrote
        slurm.update([f"NodeName={name}", "State=DRAIN", f"Reason={write_reason([XID])}"])
    slurm.now += 60
    assert drain_each(slurm, ["n1", "n2", "n3", "n4"], XID) == ["nothing", "nothing", "nothing", "shared"]
    assert [name for name, node in slurm.nodes.items() if node.drain] == ["n1", "n2", "n3"]
    slurm.away = True
    assert drain_each(slurm, ["n1"], XID) == ["unknown"]
    slurm.away, slurm.now = False, slurm.now + 600
    slurm.nodes["n0"] = FakeNode(drain=True, reason=write_reason([XID]), reason_time=slurm.now - 9000)
    assert drain_each(slurm, ["n3"], XID) == ["nothing"]  # what stands for long is not taken back


def meanwhile(slurm: FakeSlurmctld, *orders: str) -> None:
    """Others order this right before our write."""

    def others(argv: Sequence[str]) -> None:
        if argv[:2] == ["scontrol", "update"]:
            slurm.between = lambda argv: None
            for order in orders:
                name, _, reason = order.partition(" ")
                slurm.update([f"NodeName={name}", "State=DRAIN", f"Reason={reason}"])

    slurm.between = others


def test_drains_of_other_nodes_by_others_of_us_at_the_same_moment_contest_nothing() -> None:
    slurm = cluster(*(f"n{number}" for number in range(1, 41)))
    meanwhile(slurm, f"n2 {write_reason([XID])}", f"n3 {write_reason([XID])}")
    assert writer(slurm).drain("n1", XID).result == "drained"
    assert read_reason(slurm.nodes["n1"].reason) == (XID,)
    meanwhile(slurm, f"n5 {write_reason([XID])}", "n4 bob: disk")
    assert writer(slurm).drain("n4", XID).result == "contested"
    meanwhile(slurm, "n7 bob: disk")  # of another node; but that is not known of an order of somebody else's
    assert writer(slurm, breaker=False).drain("n6", XID).result == "contested"


def test_a_node_that_an_administrator_took_out_at_that_moment_stays_out_though_it_came_back_by_itself() -> None:
    slurm = cluster()
    assert writer(slurm).drain("n1", XID).result == "drained"

    def meets(argv: Sequence[str]) -> None:
        node = slurm.nodes["n1"]
        if argv[:2] == ["scontrol", "update"] and node.reason.startswith("resilio:gpu.xid"):
            slurm.update(["NodeName=n1", "State=DOWN", "Reason=bob: disk"])
        elif node.base == "DOWN" and not node.drain:
            seen.append(node.base)
            if len(seen) > 2:  # we have seen it DOWN after our write; now slurmd registers it (ReturnToService)
                node.base, node.reason = "IDLE", ""

    seen: list[str] = []
    slurm.between = meets
    assert writer(slurm).undrain("n1").result == "contested"
    node = slurm.nodes["n1"]
    assert (node.drain, read_reason(node.reason), node.reason.startswith("resilio: ")) == (True, None, True)


def test_drains_that_were_disowned_count_for_the_storm_breaker() -> None:
    slurm = cluster()
    for name in ("n1", "n2"):
        meanwhile(slurm, f"{name} bob: disk")
        assert writer(slurm).drain(name, XID).result == "contested"
    assert writer(slurm).drain("n3", XID).result == "storm"


@pytest.mark.parametrize("at", range(10))
def test_slurmctld_may_go_at_any_step_and_nothing_is_taken_for_known(at: int) -> None:
    slurm = cluster()
    step = 0

    def between(argv: Sequence[str]) -> None:
        nonlocal step
        slurm.away = step >= at
        step += 1

    slurm.between = between
    outcome = writer(slurm).drain("n1", XID)
    assert (outcome.result, outcome.unanswered) == ("unknown", True)
    assert ("an order was given" in outcome.why) == (at >= 6)  # before that it only asked


def test_an_unreadable_state_is_not_written_over() -> None:
    slurm = cluster()
    slurm.nodes["n1"].base = "SPARKLING"
    assert writer(slurm).drain("n1", XID).result == "unknown"
    assert writer(slurm).drain("nosuch", XID).result == "unknown"
    assert slurm.orders == []


def test_a_count_that_cannot_be_had_does_not_stop_a_drain() -> None:
    slurm = cluster()

    def run(argv: Sequence[str], timeout_s: float, extra: Any) -> Completed:
        if list(argv) == ["sdiag"]:
            raise CommandError(argv, 1, stderr="sdiag: Access denied")
        return slurm(argv, timeout_s, extra)

    drainer = DrainWriter(CommandClient(run), POLICY, AuditLog(None), clock=lambda: slurm.now)
    assert drainer.drain("n1", XID).result == "drained"


def test_an_audit_log_that_cannot_be_written_is_told_and_stops_no_drain(tmp_path: Path) -> None:
    full = writer(cluster(), Path("/dev/full"))
    assert full.drain("n1", XID).result == "drained"
    assert "No space left" in full.audit_problem
    (tmp_path / "file").write_text("")
    below = writer(cluster(), tmp_path / "file" / "drain.jsonl")
    assert below.drain("n1", XID).result == "drained"
    assert below.audit_problem


def test_an_audit_log_that_hangs_is_tried_once() -> None:
    tried = []

    def hanging(argv: Sequence[str], timeout_s: float, **options: Any) -> Completed:
        tried.append(timeout_s)
        raise CommandError(argv, None, why=f"no answer within {timeout_s:g} s")

    log = AuditLog(Path("/hung/drain.jsonl"), run=hanging)
    for _ in range(3):
        log.record(AuditEntry(time=0, step="outcome", act="drain", node="n1", mode="act"))
    assert tried == [2.0]
    assert "no answer" in log.problem
