"""The node daemon: each check at its pace, or when somebody asks; drains are asked for once, and again later."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.prolog_epilog.base.check import Result
from resilio_hpc.prolog_epilog.base.reports import Report
from resilio_hpc.prolog_epilog.base.reports import write as write_report
from resilio_hpc.prolog_epilog.daemon.report_intake import ReportIntake
from resilio_hpc.prolog_epilog.drain.fault_record import FaultRecord
from resilio_hpc.prolog_epilog.drain.node_drains import DRAINED_LEAVE_S, LEAVE_S, LOOK_S, STUCK
from resilio_hpc.slurm.drain.outcome import DrainResult
from resilio_hpc.slurm.node_faults.ledger import FaultLedger
from tests.support.prolog_epilog.node_trees import process, write
from tests.support.prolog_epilog.watched import Daemon, Drainer


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    yield Daemon(tmp_path)


def test_every_check_has_its_own_pace_and_who_asks_gets_a_fresh_verdict(daemon: Daemon) -> None:
    assert daemon.watch.turn() is not None and daemon.looks() == [1, 1, 1]
    daemon.at(1005.0)
    assert daemon.watch.turn() is None
    daemon.at(1010.0)
    verdict = daemon.watch.turn()
    assert verdict is not None and daemon.looks() == [2, 1, 1]
    assert len(verdict.results) == 4  # older results are still part of it
    (daemon.cache.directory / "wanted").touch()
    daemon.watch.turn()
    assert daemon.looks() == [3, 1, 2]  # what is looked at every hour is not what changes from job to job
    assert daemon.cache.read(1010.0, 60.0, "11111111-2222-3333-4444-555555555555").node == "n1"


def test_a_users_report_has_the_checks_run_anew_and_drains_nothing(tmp_path: Path) -> None:
    drainer = Drainer()
    daemon = Daemon(tmp_path, drainer)
    spool = tmp_path / "spool"
    daemon.watch.reports = ReportIntake(spool, "n1", daemon.said.append, time.time)
    daemon.watch.turn()
    write_report(spool, Report(node="n1", why="all GPUs are broken: drain it"))
    daemon.at(1005.0)
    assert daemon.watch.turn() is None  # the spool is looked at every ten seconds
    daemon.at(1059.0)
    verdict = daemon.watch.turn()
    assert daemon.looks() == [2, 1, 2]
    assert verdict is not None and verdict.action == "none" and drainer.asked == []
    assert any("reports this node: all GPUs are broken: drain it" in line for line in daemon.said)


def test_what_is_found_is_remembered(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    daemon.watch.faults = FaultRecord(FaultLedger(tmp_path / "faults"), daemon.said.append)
    daemon.broken = {"fast"}
    for now in (1000.0, 1010.0, 1020.0):
        daemon.at(now)
        daemon.watch.turn()
    (fault,) = FaultLedger(tmp_path / "faults").read().faults
    assert (fault.node, fault.kind, fault.check, fault.evidence) == ("n1", "health-error", "fast", "it is broken")


def test_checks_of_an_idle_node_say_nothing_while_a_job_is_here(daemon: Daemon) -> None:
    daemon.broken = {"idle"}
    verdict = daemon.watch.turn()
    assert verdict is not None and verdict.action == "drain"
    tree = process(950, "slurmstepd")
    tree["/proc/950/cmdline"] = "slurmstepd: [12.batch]\0"
    write(daemon.root, {**tree, "/proc/uptime": "1060.0 1.0\n"})
    verdict = daemon.watch.turn()
    assert verdict is not None and verdict.action == "none"
    assert daemon.looks()[2] == 1


def test_a_drain_is_asked_for_once_and_again_after_a_minute(tmp_path: Path) -> None:
    drainer = Drainer()
    daemon = Daemon(tmp_path, drainer)
    daemon.broken = {"fast", "slow"}
    for now in (1000.0, 1010.0, 1020.0):
        daemon.at(now)
        daemon.watch.turn()
    assert drainer.asked == [("n1", "fast", "it is broken"), ("n1", "slow", "it is broken")]
    daemon.at(1061.0)
    drainer.answer = DrainResult.LEFT
    daemon.watch.turn()
    assert len(drainer.asked) == 4
    assert [line for line in daemon.said if line.startswith("drained")] == [
        "drained: fast: it is broken",
        "drained: slow: it is broken",
    ]


def test_a_slurm_that_does_not_answer_is_asked_again_and_the_verdict_stands(tmp_path: Path) -> None:
    drainer = Drainer(SlurmError("Unable to contact slurm controller"))
    daemon = Daemon(tmp_path, drainer)
    daemon.broken = {"fast", "slow"}
    verdict = daemon.watch.turn()
    assert verdict is not None and verdict.action == "drain"
    assert len(drainer.asked) == 1  # not once for each check
    daemon.at(1061.0)
    drainer.answer = DrainResult.DRAINED
    daemon.watch.turn()
    assert len(drainer.asked) == 3


def test_in_a_storm_of_drains_prologs_are_not_to_fail_either(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, Drainer(DrainResult.STORM))
    daemon.broken = {"fast"}
    verdict = daemon.watch.turn()
    assert verdict is not None and verdict.action == "warn" and "storm" in verdict.withheld
    daemon.at(1010.0)
    verdict = daemon.watch.turn()
    assert verdict is not None and verdict.action == "warn"
    assert "action warn" in (daemon.cache.directory / "verdict").read_text()


def leave_s(daemon: Daemon, now_s: float) -> float:
    """How long prologs may fail yet, as the verdict says that they read."""
    daemon.at(now_s)
    daemon.watch.turn()
    lines = dict(line.partition(" ")[::2] for line in (daemon.cache.directory / "verdict").read_text().splitlines())
    return max(0.0, float(lines.get("leave", 0)) - now_s)


def test_prologs_may_fail_only_where_the_node_is_drained(tmp_path: Path) -> None:
    drainer = Drainer()
    daemon = Daemon(tmp_path, drainer)
    assert leave_s(daemon, 1000.0) == 0
    daemon.broken = {"fast"}
    assert leave_s(daemon, 1010.0) == DRAINED_LEAVE_S  # for jobs that were on their way
    drainer.answer = DrainResult.LEFT
    assert leave_s(daemon, 1071.0) == 0  # not renewed: whoever ends the drain finds no leave
    drainer.holds.clear()
    drainer.answer = DrainResult.DRAINED  # it was ended, and the check still fails
    assert leave_s(daemon, 1132.0) == 0
    assert leave_s(daemon, 1133.0) == DRAINED_LEAVE_S
    daemon.broken = set()
    assert leave_s(daemon, 1143.0) == 0


@pytest.mark.parametrize(("repaired", "drains"), [(True, 1), (False, 2)])
def test_a_drain_that_another_ended_is_made_again_only_after_a_look(
    tmp_path: Path, repaired: bool, drains: int
) -> None:
    drainer = Drainer()
    daemon = Daemon(tmp_path, drainer)
    daemon.broken = {"slow"}  # looked at every hour
    turns(daemon, 1000.0, 1030.0)
    daemon.broken = set() if repaired else {"slow"}
    drainer.holds.clear()
    turns(daemon, 1040.0, 1080.0)
    assert (daemon.looks()[1], len(drainer.asked)) == (2, drains)
    assert "the drain was ended by another; looking again: slow" in daemon.said


def test_a_drain_for_a_prolog_of_ours_that_failed_becomes_ours_and_ends_when_its_check_passes(tmp_path: Path) -> None:
    drainer = Drainer()
    daemon = Daemon(tmp_path, drainer)
    daemon.broken = {"device"}
    turns(daemon, 1000.0, 1010.0)
    (daemon.cache.directory / "refused").write_text("1012 7 device evict 3 GPU-1 device: it is broken\n")
    drainer.by_prolog = True
    turns(daemon, 1020.0, 1080.0)
    assert drainer.adopted == [("device", "prolog of job 7: evict 3 GPU-1 device: it is broken", 1e9 - 8.0)]
    assert leave_s(daemon, 1090.0) == 0  # no job starts there
    daemon.broken = set()
    turns(daemon, 1100.0, 1200.0)
    assert drainer.holds == set() and "undrained: device" in daemon.said
    drainer.by_prolog = True  # by another prolog, later: not by what ours did before
    turns(daemon, 1700.0, 1800.0)
    assert len(drainer.adopted) == 1


def test_prologs_may_fail_for_a_device_while_the_breaker_has_room(tmp_path: Path) -> None:
    drainer = Drainer()
    daemon = Daemon(tmp_path, drainer)
    daemon.broken = {"device"}
    assert leave_s(daemon, 1000.0) == LEAVE_S and drainer.asked == []
    assert leave_s(daemon, 1010.0) == LEAVE_S - 10 and drainer.rooms == 1  # slurmctld is not asked at each turn
    drainer.why_no_room = "9 of 90 nodes drained"
    assert leave_s(daemon, 1061.0) == 0
    assert "prologs pass, whatever they find: 9 of 90 nodes drained" in daemon.said
    drainer.answer = SlurmError("no answer")
    assert leave_s(daemon, 1122.0) == 0
    assert daemon.watch.drains is not None


def test_a_check_that_fails_on_too_many_nodes_only_warns_and_others_go_on(tmp_path: Path) -> None:
    drainer = Drainer(DrainResult.SHARED)
    daemon = Daemon(tmp_path, drainer)
    daemon.watch.faults = FaultRecord(FaultLedger(tmp_path / "faults"), daemon.said.append)
    daemon.broken = {"fast"}
    for now in (1000.0, 1010.0, 1070.0, 1600.0):  # where all nodes ask, they do so seldom
        daemon.at(now)
        verdict = daemon.watch.turn()
        assert verdict is not None and (verdict.action, verdict.withheld) == ("warn", "")
        assert "only a warning" in verdict.findings[0].evidence
    assert len(drainer.asked) == 2
    assert FaultLedger(tmp_path / "faults").read().faults == ()  # a shared cause is no fault of this node's
    drainer.answer = SlurmError("Unable to contact slurm controller")  # what was known stays
    daemon.at(2201.0)
    verdict = daemon.watch.turn()
    assert verdict is not None and verdict.action == "warn"
    daemon.broken = {"fast", "device"}
    drainer.answer = DrainResult.SHARED
    assert (
        leave_s(daemon, 2802.0) == LEAVE_S and drainer.rooms == 1
    )  # another check's fault keeps jobs off all the same
    drainer.answer = DrainResult.DRAINED
    daemon.at(3403.0)
    verdict = daemon.watch.turn()
    assert verdict is not None and verdict.action == "drain"


def test_a_drain_that_another_ended_leaves_a_check_that_only_warns_as_it_was(tmp_path: Path) -> None:
    drainer = Drainer(answers={"fast": DrainResult.SHARED})
    daemon = Daemon(tmp_path, drainer)
    daemon.broken = {"fast", "slow", "device"}
    turns(daemon, 1000.0, 1030.0)
    assert drainer.holds == {"slow"}
    drainer.holds.clear()
    daemon.broken = {"fast", "device"}
    assert leave_s(daemon, 1060.0) == 0 and daemon.looks()[1] == 1  # the verdict is older than the repair
    assert "the drain was ended by another; looking again: slow" in daemon.said
    assert leave_s(daemon, 1070.0) == LEAVE_S and daemon.looks()[1] == 2  # the device's fault is one all the same
    assert "action evict" in (daemon.cache.directory / "verdict").read_text()
    assert sorted(check for _, check, _ in drainer.asked) == ["fast", "slow"]


def test_a_drain_is_withheld_for_no_longer_than_its_check_fails_though_another_warns(tmp_path: Path) -> None:
    drainer = Drainer(answers={"fast": DrainResult.STORM, "slow": DrainResult.SHARED})
    daemon = Daemon(tmp_path, drainer)
    daemon.broken = {"fast", "slow", "device"}
    verdict = daemon.watch.turn()
    assert verdict is not None and verdict.withheld == "storm: fast: too many nodes"
    assert leave_s(daemon, 1010.0) == 0 and drainer.rooms == 0
    daemon.broken = {"slow", "device"}
    daemon.at(1020.0)
    verdict = daemon.watch.turn()
    assert verdict is not None and (verdict.action, verdict.withheld) == ("evict", "")
    assert leave_s(daemon, 1030.0) == LEAVE_S - 10


def test_a_drain_that_was_one_too_many_is_not_taken_for_one_that_another_ended(tmp_path: Path) -> None:
    drainer = Drainer()
    daemon = Daemon(tmp_path, drainer)
    daemon.broken = {"slow"}
    turns(daemon, 1000.0, 1050.0)
    drainer.answer = DrainResult.SHARED  # others that drained in the same second were first
    turns(daemon, 1060.0, 1200.0)
    assert drainer.holds == set() and daemon.looks()[1] == 1
    assert not [line for line in daemon.said if "by another" in line]


def test_a_check_that_warns_takes_no_leave_from_a_devices_fault(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, Drainer(DrainResult.SHARED))
    daemon.broken = {"slow"}
    daemon.watch.turn()
    daemon.broken = {"slow", "device"}
    turns(daemon, 1030.0, 1000.0 + LOOK_S - 10)
    assert leave_s(daemon, 1000.0 + LOOK_S) > 0  # just now it was asked for the drain again


def test_where_another_runs_the_checks_nothing_is_done(daemon: Daemon) -> None:
    with daemon.cache.locked() as ours:
        assert ours
        assert daemon.watch.turn() is None
    assert daemon.looks() == [0, 0, 0]


def test_what_is_new_is_said_and_what_is_over(daemon: Daemon) -> None:
    daemon.watch.turn()
    daemon.broken = {"fast"}
    for now in (1010.0, 1020.0):
        daemon.at(now)
        daemon.watch.turn()
    daemon.broken = set()
    daemon.at(1030.0)
    daemon.watch.turn()
    assert daemon.said == ["drain: fast: it is broken", "no more: drain fast"]


def turns(daemon: Daemon, first_s: float, last_s: float, every_s: float = 10.0) -> None:
    now = first_s
    while now <= last_s:
        daemon.at(now)
        daemon.watch.turn()
        now += every_s


def test_a_drain_is_given_back_when_its_check_has_passed_often_enough(tmp_path: Path) -> None:
    drainer = Drainer(needed=20)
    daemon = Daemon(tmp_path, drainer)
    daemon.broken = {"fast"}
    turns(daemon, 1000.0, 1100.0)
    assert drainer.holds == {"fast"}
    daemon.broken = set()
    turns(daemon, 1110.0, 1290.0)
    assert drainer.holds == {"fast"}  # at most 19 passes
    turns(daemon, 1300.0, 1370.0)
    assert drainer.holds == set()
    turns(daemon, 1380.0, 2100.0, every_s=60.0)
    assert daemon.said[-1] == "undrained: fast"  # and not taken for another's act


def test_a_drain_of_slurms_own_is_offered_when_no_process_has_been_stuck_for_a_while(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, Drainer())
    assert daemon.watch.drains is not None
    turns(daemon, 1000.0, 1000.0 + LOOK_S, every_s=60.0)
    assert daemon.said == []
    for _ in range(3):
        daemon.watch.drains.looked([Result(check=STUCK, status="pass", on_fail="drain", severity="error")])
    turns(daemon, 1010.0 + LOOK_S, 1010.0 + 2 * LOOK_S, every_s=60.0)
    assert daemon.said == ["offered: to end a drain of Slurm's on n1"]


def test_passes_count_in_a_row(tmp_path: Path) -> None:
    drainer = Drainer(needed=12)
    daemon = Daemon(tmp_path, drainer)
    for first in (1000.0, 1110.0, 1220.0):  # ten passes after each failure
        daemon.broken = {"fast"}
        turns(daemon, first, first)
        daemon.broken = set()
        turns(daemon, first + 10.0, first + 100.0)
    assert drainer.holds == {"fast"}


def test_drains_of_an_earlier_daemon_are_found_and_a_healthy_node_is_hardly_asked_for(tmp_path: Path) -> None:
    drainer = Drainer(holds={"slow", "manual"})
    daemon = Daemon(tmp_path, drainer)
    drainer.needed = 1
    turns(daemon, 1000.0, 1070.0)
    assert drainer.holds == {"manual"}  # of no check: a person's
    drainer.holds.clear()
    turns(daemon, 1080.0, 1200.0)
    before = drainer.looks
    turns(daemon, 1210.0, 1210.0 + 2 * LOOK_S, every_s=60.0)
    assert drainer.looks - before == 2


def test_while_slurm_is_away_nothing_is_given_back_and_that_is_said_once(tmp_path: Path) -> None:
    drainer = Drainer(SlurmError("Unable to contact slurm controller"), needed=1, holds={"fast"})
    daemon = Daemon(tmp_path, drainer)
    turns(daemon, 1000.0, 1000.0 + 2 * LOOK_S, every_s=60.0)
    assert daemon.said == [
        "whether this node's drains may end is not known: Unable to contact slurm controller",
    ]
    drainer.answer = DrainResult.DRAINED
    turns(daemon, 1010.0 + 2 * LOOK_S, 1010.0 + 3 * LOOK_S, every_s=60.0)
    assert drainer.holds == set()
