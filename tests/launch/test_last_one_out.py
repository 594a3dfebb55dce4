"""When a job may be closed from outside its batch script, and that closing it is safe to repeat and to interrupt."""

from __future__ import annotations

import json
import socket
import stat
import threading
from pathlib import Path

import pytest

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.launch.allocation.placements import Site, SiteMode
from resilio_hpc.launch.chain import handover, joining, orphaned_job, predecessor, preemption
from resilio_hpc.launch.chain.orphaned_job import LIMIT_S, PATIENCE, STILL_S, CleanupLimits, Closing, Sight, stand_ins
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.protocol.vote import EpochRecord
from resilio_hpc.launch.rundir import run_directory
from resilio_hpc.slurm.chain import chain
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.commands import Holding
from resilio_hpc.slurm.client.slurm_errors import Unanswered

QUICK = CleanupLimits(poll_s=0.01)
LOST = Holding("n1", ("n2", "n3"), "RUNNING")
HELD = Holding("n1", ("n1", "n2", "n3"), "RUNNING")


def looks(closing: Closing, *sights: tuple[float, Holding | None, object, str]) -> list[str]:
    return [closing.look(Sight(*sight)) for sight in sights]


def test_with_a_verdict_and_the_batch_host_gone_the_job_is_closed_at_once() -> None:
    assert looks(Closing(0.0, "completed"), (0.0, LOST, 5, "")) == ["close"]


def test_a_supervisor_that_may_live_has_time_to_close_the_run() -> None:
    closing = Closing(0.0, "")
    seen = (1.0, HELD, 5, "time_limit"), (20.0, None, 5, "time_limit"), (PATIENCE.supervisor_s, HELD, 5, "time_limit")
    assert looks(closing, *seen) == ["wait", "wait", "close"]


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "TIMEOUT", "UNKNOWN"])
def test_a_job_that_is_over_is_left_alone(state: str) -> None:
    assert looks(Closing(0.0, "terminated"), (0.0, Holding("n1", (), state), 5, "")) == ["over"]


def test_without_a_verdict_a_run_that_somebody_leads_is_left_alone() -> None:
    closing = Closing(0.0, "")
    assert looks(closing, (0.0, LOST, 5, ""), (1.0, LOST, 5, ""), (2.0, LOST, 6, "")) == ["wait", "wait", "others"]


def test_without_a_verdict_a_still_pulse_and_slurms_word_close_the_job() -> None:
    closing = Closing(0.0, "")
    seen = (0.0, HELD, 5, ""), (STILL_S + 1, HELD, 5, ""), (STILL_S + 2, None, 5, ""), (STILL_S + 3, LOST, 5, "")
    assert looks(closing, *seen) == ["wait", "wait", "wait", "close"]


def test_the_end_is_bounded_whatever_slurm_says() -> None:
    closing = Closing(0.0, "")
    assert looks(closing, (0.0, None, None, ""), (LIMIT_S - 1, None, None, ""), (LIMIT_S, None, None, "")) == [
        "wait", "wait", "close"
    ]  # fmt: skip


# ---- closing


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = run_directory.open_run(tmp_path / "run").path
    chain.write_links(path, [chain.Link(1, "7"), chain.Link(2, "8")])
    return path


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An scancel that fails as often as ``refuse`` says, and notes what it cancelled in ``cancelled``; and a squeue."""
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    programs = {
        "scancel": f'[ -e "{tmp_path}/refuse" ] && rm "{tmp_path}/refuse" && exit 1\n'
        f'ls "{tmp_path}"/run/links/*.handover.json >/dev/null || echo "no record" >> "{tmp_path}/cancelled"\n'
        f'[ $# = 1 ] && echo "$1" >> "{tmp_path}/cancelled"\n',
        "squeue": 'case "$*" in "-h -t all -j 7 -o %B|%N|%T"|"-h -t all -j 8 -o %B|%N|%T") echo "n1|n[2-3]|RUNNING";; '
        "*) exit 9;; esac\n",
    }
    programs["scontrol"] = (
        f'case "$*" in "-o show job 7") cat "{tmp_path}/job" 2>/dev/null;; '
        f'"requeue 7") echo "requeued 7" >> "{tmp_path}/cancelled";; *) exit 9;; esac\n'
    )
    for name, body in programs.items():
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{body}")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return tmp_path


def cancelled(slurm: Path) -> list[str]:
    return (slurm / "cancelled").read_text().split("\n")[:-1]


def test_the_record_is_there_before_the_job_is_cancelled(run: Path, slurm: Path) -> None:
    assert orphaned_job.close_job(run, "7", {"verdict": "needs_new_job"}, "batch_host_lost", patience=QUICK)
    assert cancelled(slurm) == ["7"]
    record = handover.read(run, "7")
    assert record is not None
    assert (record.by, record.reason, record.carries_on) == ("n3", "batch_host_lost", True)


def test_a_run_that_is_over_takes_its_successor_with_it(run: Path, slurm: Path) -> None:
    run_directory.write_verdict(run, "7", {"verdict": "completed", "exit_code": 0})
    assert orphaned_job.close_job(run, "7", patience=QUICK)
    assert cancelled(slurm) == ["8", "7"]
    record = handover.read(run, "7")
    assert record is not None
    assert not record.carries_on


def test_closing_again_after_a_crash_in_between_keeps_the_first_record(run: Path, slurm: Path) -> None:
    first = handover.leave(run, "7", "n2", "batch_host_lost", True)
    assert orphaned_job.close_job(run, "7", {"verdict": "needs_new_job"}, "another reason", patience=QUICK)
    assert handover.read(run, "7") == first
    assert cancelled(slurm) == ["7"]


def test_slurmctld_may_be_away_for_a_while(run: Path, slurm: Path) -> None:
    (slurm / "refuse").touch()
    assert orphaned_job.close_job(run, "7", {"verdict": "needs_new_job"}, patience=QUICK)
    assert cancelled(slurm) == ["7"]


def test_without_slurm_closing_gives_up_and_does_not_raise(
    run: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(slurm / "nothing"))
    soon = CleanupLimits(supervisor_s=0.05, cancel_s=0.05, poll_s=0.01)
    assert not orphaned_job.close_job(run, "7", {"verdict": "needs_new_job"}, patience=soon)


def test_a_run_directory_that_hangs_holds_nobody_up() -> None:
    hung = threading.Event()
    assert orphaned_job.bounded(lambda: hung.wait(), False, 0.05) is False
    hung.set()


def test_a_requeued_part_is_closed_under_its_jobs_number(run: Path, slurm: Path) -> None:
    assert orphaned_job.close_job(run, "7r2", {"verdict": "needs_new_job"}, patience=QUICK)
    assert cancelled(slurm) == ["7"]
    assert handover.read(run, "7r2") is not None
    assert handover.read(run, "7") is None


def test_where_no_next_job_could_be_submitted_the_job_itself_is_requeued(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_directory.open_run(tmp_path / "run").path
    options = LaunchOptions("true", "command", str(run), chain=True)
    for part, chained in (("6", True), ("7", False)):  # another job's record, and a job without --chain
        joining.write_record(run, joining.record_of(options, Site(SiteMode.BATCH, part, ("n1",), True), chained))
        assert orphaned_job.hand_over(run, "7", "needs_new_job", "batch_host_lost", QUICK)
    joining.write_record(run, joining.record_of(options, Site(SiteMode.BATCH, "7", ("n1",), True), True))
    (slurm / "job").write_text("JobId=7 JobState=RUNNING Requeue=0 Restarts=0\n")
    assert orphaned_job.hand_over(run, "7", "needs_new_job", "batch_host_lost", QUICK)
    assert cancelled(slurm) == ["7"] * 3
    (slurm / "job").write_text("JobId=7 JobState=RUNNING Requeue=1 Restarts=0\n")
    assert orphaned_job.hand_over(run, "7", "completed", "batch_host_lost", QUICK)
    assert orphaned_job.hand_over(run, "7", "needs_new_job", "batch_host_lost", QUICK)
    assert cancelled(slurm) == ["7"] * 4 + ["requeued 7"]


def test_a_job_that_is_being_preempted_is_left_to_slurm(
    run: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def stay(job: str) -> float:
        assert not (slurm / "cancelled").exists()
        order.append(job)
        return 1.0

    monkeypatch.setattr(preemption, "stay_until_ended", stay)
    (slurm / "job").write_text(
        "JobId=7 JobState=RUNNING Requeue=1 Restarts=0 StartTime=1795277625 EndTime=1795277642 PreemptTime=1795277627\n"
    )
    assert orphaned_job.close_job(run, "7", {"verdict": "terminated"}, patience=QUICK)
    assert order == ["7"]


# -- a step of srun ------------------------------------------------------------------------------------------------


def test_a_few_of_those_that_are_left_stand_in_for_a_lost_batch_host() -> None:
    nodes = ("n1", "n2", "n3", "n4", "n5")
    assert stand_ins(nodes, (), "n1") == ()
    assert stand_ins(nodes, ("n1",), "n5") == ("n2", "n3", "n5")
    assert stand_ins(nodes, ("n1", "n2"), "n3") == ("n3", "n4")


@pytest.mark.parametrize(
    ("lost", "node", "part", "closed"),
    [
        (["n1"], "n3", "7", ["7"]),
        ([], "n3", "7", []),  # the batch host lives, and ends the job when srun returns
        (["n2"], "n3", "7", []),
        (["n1"], "n5", "7", []),  # others do
        (["n1"], "n3", "6", []),  # what an earlier part has lost
    ],
)
def test_who_stands_in(
    lost: list[str],
    node: str,
    part: str,
    closed: list[str],
    run: Path,
    slurm: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_directory.claim_epoch(run, EpochRecord(3, "n2", "10.0.0.2:5", part))
    (run / "status.json").write_text(json.dumps({"epoch": 3, "controller": "n2", "lost": lost}))
    run_directory.write_verdict(run, "7", {"verdict": "needs_new_job", "exit_code": 75})
    monkeypatch.setenv("SLURMD_NODENAME", node)
    held = '"n1|n[1-5]|RUNNING"' if lost != ["n1"] else '"n1|n[2-5]|RUNNING"'
    (slurm / "bin" / "squeue").write_text(f"#!/bin/sh\necho {held}\n")
    (slurm / "cancelled").touch()
    orphaned_job.stand_in(run, "7", ("n1", "n2", "n3", "n4", "n5"), QUICK)
    assert cancelled(slurm) == closed


def test_a_node_that_is_cut_off_with_slurmctld_closes_the_job_once_slurm_takes_the_batch_host_for_lost(
    run: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_directory.claim_epoch(run, EpochRecord(3, "n2", "10.0.0.2:5", "7"))
    (run / "status.json").write_text(json.dumps({"epoch": 3, "controller": "n2", "lost": ["n3", "n4"]}))
    run_directory.write_verdict(run, "7", {"verdict": "needs_new_job", "exit_code": 75})
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    squeue = slurm / "bin" / "squeue"
    squeue.write_text('#!/bin/sh\necho "n1|n[1-4]|RUNNING"\n')
    (slurm / "cancelled").touch()
    monkeypatch.setattr(orphaned_job, "reaches_srun", lambda environment: True)
    orphaned_job.stand_in(run, "7", ("n1", "n2", "n3", "n4"), QUICK)
    assert cancelled(slurm) == [], "the batch host lives, and ends the job when srun returns"
    monkeypatch.setattr(orphaned_job, "reaches_srun", lambda environment: False)
    squeue.write_text('#!/bin/sh\necho "n1|n[3-4]|RUNNING"\n')
    orphaned_job.stand_in(run, "7", ("n1", "n2", "n3", "n4"), QUICK)
    assert cancelled(slurm) == ["7"]


def test_who_is_cut_off_closes_nothing_before_slurm_says_so() -> None:
    closing = Closing(0.0, "completed", cut_off=True)
    late = PATIENCE.supervisor_s + 1.0
    assert looks(closing, (late, HELD, None, ""), (late, None, None, ""), (late + 1, LOST, None, "")) == [
        "wait", "wait", "close",
    ]  # fmt: skip
    assert looks(Closing(0.0, "completed", cut_off=True), (LIMIT_S, HELD, None, "")) == ["others"]


def test_whether_the_host_of_the_steps_srun_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        there = {"SLURM_SRUN_COMM_HOST": "127.0.0.1", "SLURM_SRUN_COMM_PORT": port}
        assert orphaned_job.reaches_srun(there)
    assert orphaned_job.reaches_srun(there), "srun has gone, its host has not"
    assert orphaned_job.reaches_srun({})
    assert not orphaned_job.reaches_srun({**there, "SLURM_SRUN_COMM_HOST": "no-such-host.invalid"})


# -- a record that no file takes -----------------------------------------------------------------------------------


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run directory does not answer."""
    monkeypatch.setattr(orphaned_job, "bounded", lambda _call, otherwise, _patience: otherwise)


def test_the_jobs_comment_takes_the_record_and_names_the_part(
    run: Path, hung: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    comments: list[str] = []
    ended: list[str] = []

    def comment(job: str, text: str) -> None:
        comments.append(text)
        if len(comments) == 1:
            raise Unanswered("away")

    monkeypatch.setattr(commands, "set_comment", comment)
    monkeypatch.setattr(commands, "cancel", ended.append)
    assert orphaned_job.hand_over(run, "7r1", "needs_new_job", "batch_host_lost", QUICK)
    assert ended == ["7"]
    monkeypatch.setattr(commands, "job_fields", lambda _: {"Comment": comments[-1]})
    record = predecessor._comment_record("7r1")
    assert record is not None
    assert (record.reason, record.carries_on) == ("batch_host_lost", True)
    assert predecessor._comment_record("7r2") is None


def test_without_any_record_the_job_is_not_cancelled_since_the_chain_would_end(
    run: Path, hung: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: str) -> None:
        raise SlurmError("Access denied")

    ended: list[str] = []
    monkeypatch.setattr(commands, "set_comment", refuse)
    monkeypatch.setattr(commands, "cancel", ended.append)
    assert not orphaned_job.hand_over(run, "7", "needs_new_job", "batch_host_lost", QUICK)
    assert ended == []
    assert orphaned_job.hand_over(run, "7", "failed", "batch_host_lost", QUICK)  # nothing is left to do
    assert ended == ["7"]
