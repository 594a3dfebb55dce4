"""What a ledger tells of sizes, and how the run's jobs are told apart in the queue."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.autoparallel import Inventory, Measurement, Pool
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.ledger import Event
from resilio_hpc.launch.chain import joining
from resilio_hpc.launch.chain.joining import LaunchRecord
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.resize import resizer
from resilio_hpc.launch.resize.facts import ResizeFacts, Successor
from resilio_hpc.launch.resize.history import ResizeHistory, read_history
from resilio_hpc.launch.resize.policy import resize_policy
from resilio_hpc.launch.resize.resizer import Resizer
from resilio_hpc.launch.resize.view import ResizeLimits, ResizeView, joiner_of, nodes_of_user
from resilio_hpc.launch.rundir import run_claim, run_directory
from resilio_hpc.slurm.client.model import Job
from resilio_hpc.slurm.client.states import job_state
from resilio_hpc.slurm.orders import reshape
from resilio_hpc.slurm.submit.joiner_job import comment_of, joiner_values, joiners_of, memory_mb, render_joiner

FIELDS = {
    "Partition": "main", "Account": "(null)", "QOS": "normal", "TresPerNode": "gres:gpu:h100:8", "Features": "ib",
    "MinMemoryNode": "62.50G", "OverSubscribe": "NO", "CPUs/Task": "4",
}  # fmt: skip


def event(at: float, kind: str, **fields: Any) -> Event:
    return Event(at, "7-n1", kind, fields)


def one_round(begin: float, number: int, nodes: int, step_s: float) -> list[Event]:
    members = [f"n{index}" for index in range(nodes)]
    commits = [event(begin + 5 + 10 * k * step_s, "committed", step=100 * number + 10 * k) for k in range(1, 4)]
    return [
        event(begin, "round", round=number, members=members),
        event(begin + 4, "first_step", round=number),
        *commits,
    ]


# -- the ledger ------------------------------------------------------------------------------------------------------


def test_step_times_are_of_the_commits_of_each_round() -> None:
    events = [*one_round(0, 0, 2, 1.0), *one_round(100, 1, 4, 0.5)]
    history = read_history(events)
    assert history.steps == (Measurement(2, 1.0), Measurement(4, 0.5))
    assert (history.round, history.trains) == (1, True)


def test_a_late_commit_of_the_round_before_and_a_failure_spoil_nothing() -> None:
    begun, first, *commits = one_round(100, 1, 4, 0.5)
    late = event(101, "committed", step=30)
    failed = [event(121, "rank_failed", round=1), event(300, "committed", step=140)]
    assert read_history([begun, late, first, *commits, *failed]).steps == (Measurement(4, 0.5),)


def test_a_round_with_one_commit_measures_nothing() -> None:
    assert read_history(one_round(0, 0, 2, 1.0)[:3]).steps == ()


def test_what_planned_restarts_cost_goes_before_recoveries() -> None:
    recovered = event(5, "recovered", recovery_s=3.0)
    planned = [event(10, "regroup"), event(18, "first_step"), event(30, "regroup"), event(50, "first_step")]
    failed = [event(60, "regroup"), event(61, "node_lost"), event(99, "first_step")]
    assert read_history([recovered]).restart_s == 3.0
    assert read_history([recovered, *planned, *failed]).restart_s == 14.0
    assert read_history([]) == ResizeHistory()


def resized(at: float, action: str, *jobs: str, acted: bool = True, code: str = "") -> Event:
    return event(at, "resize", action=action, jobs=list(jobs), acted=acted, code=code)


def test_what_was_asked_of_joiners() -> None:
    events = [
        resized(1, "grow", "20", "21"), event(2, "joins", job="20"), resized(3, "shrink", "20"),
        resized(4, "shrink", "20"), resized(5, "end", "20"), resized(6, "withdraw", "21", code="others_wait"),
        resized(6, "withdraw", "22", code="too_late"),
        resized(7, "grow", "30", acted=False), event(8, "resize", action="stay", jobs=[], acted=False),
    ]  # fmt: skip
    history = read_history(events)
    assert (history.asked_to_leave, history.told_to_end, history.last_resize) == ({"20": 3}, {"20": 5}, 5)
    assert (dict(history.submitted), history.joined, history.withdrawn) == ({"20": 1, "21": 1}, {"20"}, {"21"})


def test_joiners_that_never_joined_are_counted_from_the_newest() -> None:
    history = ResizeHistory(
        submitted={"20": 1.0, "21": 2.0, "22": 3.0, "23": 4.0, "24": 5.0}, joined=frozenset({"20"}),
        withdrawn=frozenset({"22"}),
    )  # fmt: skip
    assert history.lost_in_a_row([], since=0.0) == 3
    assert history.lost_in_a_row(["23"], since=0.0) == 1
    assert history.lost_in_a_row([], since=4.5) == 1


# -- the queue -------------------------------------------------------------------------------------------------------


def job(number: int, state: str = "RUNNING", **fields: Any) -> Job:
    return Job(number, job_state([state]), user_id=1000, comment=comment_of("r1"), **fields)


def test_a_comment_alone_makes_no_joiner() -> None:
    mine = job(20)
    others = [replace(mine, user_id=1001), replace(mine, comment=comment_of("r2")), job(21, "COMPLETED"), job(22, "??")]
    assert joiners_of("r1", 1000, [*others, mine]) == (mine,)


@pytest.mark.parametrize(
    ("found", "state", "since_s"),
    [
        (job(20, "PENDING", submit_time=70), "pending", 30.0),
        (job(20, start_time=40), "running", 60.0),
        (job(21, start_time=40), "leaving", 10.0),
        (job(22, start_time=40), "ending", 5.0),
        (job(20, "COMPLETED", start_time=40), "ending", 0.0),
        (job(20, start_time=400), "running", 0.0),
    ],
)
def test_how_a_joiner_stands(found: Job, state: str, since_s: float) -> None:
    history = ResizeHistory(asked_to_leave={"21": 90.0, "22": 80.0}, told_to_end={"22": 95.0})
    joiner = joiner_of(found, history, 100.0)
    assert (joiner.state, joiner.since_s) == (state, since_s)


def test_a_users_nodes_are_those_held_and_those_waited_for() -> None:
    jobs = [
        job(1, node_count=4), job(2, "PENDING", node_count=2, reason="Resources"),
        job(3, "PENDING", node_count=9, reason="Dependency"), replace(job(4, node_count=7), user_id=5),
        job(5, "COMPLETED", node_count=5),
    ]  # fmt: skip
    assert nodes_of_user(jobs, 1000) == 6


# -- the job ---------------------------------------------------------------------------------------------------------


def test_a_joiner_asks_for_what_the_runs_own_job_has() -> None:
    values = joiner_values(FIELDS, "r1", Path("/runs/my run"), ["n1", "n2"], 3601.0)
    script, arguments = render_joiner(values, 2)
    assert {
        "--nodes=2", "--partition=main", "--qos=normal", "--constraint=ib", "--mem=64000M", "--gpus-per-node=h100:8",
        "--cpus-per-task=4", "--exclusive", "--exclude=n[1-2]", "--time=61", "--comment=resilio joiner of r1",
        "--output=/runs/my run/joiners/%j.out",
    } <= set(arguments)  # fmt: skip
    assert "RUN_DIR='/runs/my run'" in script and "--account" not in " ".join(arguments)


@pytest.mark.parametrize(("ends_in_s", "minutes"), [(None, "240"), (1e9, "240"), (90.0, "2"), (-5.0, "1")])
def test_a_joiner_lasts_no_longer_than_the_run(ends_in_s: float | None, minutes: str) -> None:
    assert joiner_values(FIELDS, "r1", Path("/r"), [], ends_in_s)["time"] == minutes


@pytest.mark.parametrize(("text", "size"), [("64G", 65536), ("62.50G", 64000), ("500M", 500), ("0", 0), ("x", 0)])
def test_memory_as_scontrol_writes_it(text: str, size: int) -> None:
    assert memory_mb(text) == size


def test_gpus_that_are_not_of_the_node_have_to_be_said() -> None:
    values = joiner_values({**FIELDS, "TresPerNode": "", "TresPerTask": "gres:gpu:1"}, "r1", Path("/r"), [], None)
    with pytest.raises(UsageError, match="say how many a node has, gpus_per_node=8"):
        render_joiner(values, 1)
    assert "--gpus-per-node=4" in render_joiner({**values, "gpus_per_node": "4"}, 1)[1]


# -- the run directory -----------------------------------------------------------------------------------------------


class NoSlurm:
    """A fake client: any question or order is an error."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"Slurm was asked for {name}")


def a_run(path: Path, job_number: str = "7") -> Path:
    run_directory.open_run(path)
    options = LaunchOptions(script="train.py", kind="script", run_dir=str(path))
    joining.write_record(path, LaunchRecord(job_number, job_number, options, "/work", False))
    return path


def view_of(path: Path) -> ResizeView:
    return ResizeView(path, NoSlurm(), ResizeLimits(), resize_policy())  # type: ignore[arg-type]


def test_what_cannot_be_resized_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^resilio resize .*: there is no such run directory"):
        view_of(tmp_path / "gone")
    with pytest.raises(UsageError, match=r"is no Slurm job \(local-1-2\)"):
        view_of(a_run(tmp_path / "local", "local-1-2")).facts()
    run_directory.open_run(tmp_path / "empty")
    with pytest.raises(UsageError, match="has not begun"):
        view_of(tmp_path / "empty").facts()


def test_one_resizer_at_a_time_and_none_is_kept_out_by_a_dry_run(tmp_path: Path) -> None:
    path = a_run(tmp_path / "run")
    first = Resizer(view_of(path), NoSlurm(), resize_policy(), {}, dry_run=False)  # type: ignore[arg-type]
    Resizer(view_of(path), NoSlurm(), resize_policy(), {}, dry_run=True).close()  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="another resilio resize looks after this run"):
        Resizer(view_of(path), NoSlurm(), resize_policy(), {}, dry_run=False)  # type: ignore[arg-type]
    first.close()
    Resizer(view_of(path), NoSlurm(), resize_policy(), {}, dry_run=False).close()  # type: ignore[arg-type]


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    path = a_run(tmp_path / "run")
    before = sorted(os.walk(path))
    Resizer(view_of(path), NoSlurm(), resize_policy(), {}, dry_run=True).close()  # type: ignore[arg-type]
    assert sorted(os.walk(path)) == before


class PendingJob:
    """Answers for the successor, job 8 of user 1000, and keeps what it is told."""

    def __init__(self, fields: dict[str, str]) -> None:
        self.fields = fields
        self.ordered: list[dict[str, str]] = []

    @property
    def orders(self) -> PendingJob:
        return self

    def look(self, number: str) -> dict[str, str]:
        assert number == "8"
        return dict(self.fields)

    def update_job(self, number: str, changes: dict[str, str]) -> None:
        assert number == "8"
        self.ordered.append(changes)
        self.fields |= changes


class OneLook:
    """A fake view: a run that waits for its next job, for which too few nodes are free."""

    def __init__(self, path: Path, facts: ResizeFacts) -> None:
        self.path, self._facts = path, facts

    def facts(self) -> ResizeFacts:
        return self._facts


@pytest.mark.parametrize(("state", "error"), [("PENDING", ""), ("RUNNING", "job 8 does not wait any more: RUNNING")])
def test_a_successor_that_waits_gets_its_size_and_then_the_nodes_to_avoid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, error: str
) -> None:
    path = a_run(tmp_path / "run")
    assert run_claim.take(path, run_claim.Turn(1, "7", "7", 1, ("n1", "n2", "n3"), -1, 0.0))
    slurm = PendingJob({
        "JobId": "8", "JobState": state, "UserId": f"me({os.geteuid()})", "Command": f"{path}/batch-7.sh",
        "NumNodes": "3-3", "NumTasks": "3", "NumCPUs": "3", "ExcNodeList": "(null)",
    })  # fmt: skip
    avoided: list[tuple[object, ...]] = []
    monkeypatch.setattr(resizer.node_exclusion, "avoid_faulty_nodes", lambda *told: avoided.append(told[:4]))
    monkeypatch.setattr(reshape, "reshape", partial(reshape.reshape, look=slurm.look))
    facts = ResizeFacts(
        phase="between_jobs", nodes=0, least=1, most=3, unit=1, own_nodes=3, held=frozenset(), ranks_per_node=1,
        partition="main", inventory=Inventory((Pool("main", "", 0, ("n1", "n2", "n3"), ("n1", "n2"), ()),), ()),
        successor=Successor("8", 3, waits_for_nodes=True),
    )  # fmt: skip
    hand = Resizer(OneLook(path, facts), slurm, resize_policy(), {}, dry_run=False)  # type: ignore[arg-type]
    decision, said = hand.step()
    hand.close()
    assert (decision.action, decision.sizes, said) == ("reshape", (2,), error)
    if error:
        assert (slurm.ordered, avoided) == ([], [])
    else:
        assert [order["NumNodes"] for order in slurm.ordered] == ["2-2"]
        assert avoided == [(path, "7", ("n1", "n2", "n3"), "8")]
