"""The node daemon: each check at its pace, or when somebody asks; drains are asked for once, and again later."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.prolog_epilog.cached_verdict import VerdictCache
from resilio_hpc.prolog_epilog.check import Check, Fault, Result
from resilio_hpc.prolog_epilog.drains import Answer, Outcome
from resilio_hpc.prolog_epilog.examination import Examination
from resilio_hpc.prolog_epilog.fault_record import FaultRecord
from resilio_hpc.prolog_epilog.node import Node
from resilio_hpc.prolog_epilog.node_drains import LEAVE_S, LOOK_S, STUCK, NodeDrains
from resilio_hpc.prolog_epilog.probe import Probe, Source
from resilio_hpc.prolog_epilog.report_desk import ReportDesk
from resilio_hpc.prolog_epilog.reports import Report
from resilio_hpc.prolog_epilog.reports import write as write_report
from resilio_hpc.prolog_epilog.table import Table
from resilio_hpc.prolog_epilog.watch import Watch
from resilio_hpc.slurm.node_faults.ledger import FaultLedger
from tests.support.prolog_epilog.node_trees import process, write


def check(name: str, every_s: float, *contexts: str, on_fail: str = "drain") -> Check:
    row: dict[str, Any] = {"contexts": contexts or ("health",), "on_fail": on_fail, "severity": "error"}
    return Check(id=name, source=name, budget_s=20, reason="r", summary="s", origin="o", every_s=every_s, **row)


@dataclass
class Drainer:
    """One that does as the test says, and notes what it was asked."""

    answer: Outcome | SlurmError = "drained"
    needed: int = 3
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    holds: set[str] = field(default_factory=set)
    looks: int = 0
    why_no_room: str = ""
    rooms: int = 0

    def _answer(self) -> Outcome:
        if isinstance(self.answer, SlurmError):
            raise self.answer
        return self.answer

    def drain(self, node: str, check_id: str, evidence: str) -> Answer:
        self.asked.append((node, check_id, evidence))
        self.holds |= {check_id} if self._answer() == "drained" else set()
        return Answer(self._answer())

    def room(self, node: str) -> str:
        self.rooms += 1
        self._answer()
        return self.why_no_room

    def held(self, node: str) -> frozenset[str]:
        self.looks += 1
        self._answer()
        return frozenset(self.holds)

    def offer(self, node: str, passes: int) -> str:
        return f"offered: to end a drain of Slurm's on {node}" if passes >= self.needed else ""

    def undrain(self, node: str, check_id: str, passes: int) -> str:
        if passes < self.needed:
            return ""
        self.holds.remove(check_id)
        return f"undrained: {check_id}"


class Daemon:
    """A watch over a tree; ``broken`` names what fails. Looks are counted in files, since children make them."""

    def __init__(self, folder: Path, drainer: Drainer | None = None) -> None:
        self.root = write(folder / "root")
        self.counts = folder / "counts"
        self.counts.mkdir()
        (folder / "run").mkdir()
        self.cache = VerdictCache(folder / "run" / "health")
        self.said: list[str] = []
        self.broken: set[str] = set()
        checks = [check("fast", 10), check("slow", 3600), check("idle", 60, "idle"),
                  check("device", 10, on_fail="evict")]  # fmt: skip
        table = Table({one.id: one for one in checks}, {})
        sources = {one.id: Source(self.fetch(one.id)) for one in checks}
        probes = {one.id: Probe.of(lambda reading, limits: reading) for one in checks}
        examination = Examination(table, Node(root=self.root), "n1", sources, probes, lambda: 1e9)
        drains = NodeDrains(drainer, self.said.append) if drainer is not None else None
        self.watch = Watch(examination, self.cache, self.said.append, drains)
        self.at(1000.0)

    def fetch(self, name: str) -> Any:
        def look(node: Node) -> list[Fault]:
            with (self.counts / name).open("a") as file:
                file.write("x")
            return [Fault("it is broken")] if name in self.broken else []

        return look

    def at(self, uptime_s: float) -> None:
        (self.root / "proc/uptime").write_text(f"{uptime_s:.2f} 1.0\n")

    def looks(self) -> list[int]:
        return [len(path.read_text()) if path.exists() else 0
                for path in (self.counts / name for name in ("fast", "slow", "idle"))]  # fmt: skip


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
    daemon.watch.reports = ReportDesk(spool, "n1", daemon.said.append, time.time)
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
    drainer.answer = "already"
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
    drainer.answer = "drained"
    daemon.watch.turn()
    assert len(drainer.asked) == 3


def test_in_a_storm_of_drains_prologs_are_not_to_fail_either(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, Drainer("withheld"))
    daemon.broken = {"fast"}
    verdict = daemon.watch.turn()
    assert verdict is not None and verdict.action == "warn" and "withheld" in verdict.withheld
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
    assert leave_s(daemon, 1010.0) == LEAVE_S
    drainer.answer = SlurmError("Unable to contact slurm controller")
    assert leave_s(daemon, 1071.0) == 0
    drainer.answer = "already"  # somebody else's drain does as well
    assert leave_s(daemon, 1132.0) == LEAVE_S
    daemon.broken = set()
    assert leave_s(daemon, 1142.0) == 0


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
    drainer = Drainer("warned")
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
    drainer.answer = "warned"
    assert (
        leave_s(daemon, 2802.0) == LEAVE_S and drainer.rooms == 1
    )  # another check's fault keeps jobs off all the same
    drainer.answer = "drained"
    daemon.at(3403.0)
    verdict = daemon.watch.turn()
    assert verdict is not None and verdict.action == "drain"


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
    assert daemon.said[-1] == "undrained: fast"


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
    drainer.answer = "drained"
    turns(daemon, 1010.0 + 2 * LOOK_S, 1010.0 + 3 * LOOK_S, every_s=60.0)
    assert drainer.holds == set()
