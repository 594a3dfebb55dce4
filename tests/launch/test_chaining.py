"""What a job's chain does at its two ends, with Slurm's answers made up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from resilio_hpc.core.errors import SlurmError, UsageError
from resilio_hpc.core.ledger import Ledger
from resilio_hpc.launch.allocation.placements import Site, SiteMode
from resilio_hpc.launch.chain import chaining, fencing, maintenance, preemption, successor
from resilio_hpc.launch.chain.chaining import Chain
from resilio_hpc.launch.chain.continuation_policy import PredecessorEvidence
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.rundir import chain_order, run_claim, run_directory
from resilio_hpc.launch.rundir.chain_order import ChainOrder
from resilio_hpc.slurm.chain import chain as slurm_chain
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.slurm_errors import SubmitLimit, Unanswered
from tests.support.waiting import PATIENCE_S, until

Begin = Callable[..., Chain]


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Slurm's word on job 7."""
    fields = {"JobState": "RUNNING", "Requeue": "1", "PreemptTime": "None", "StartTime": "1795276800"}

    def job_fields(job: str) -> dict[str, str]:
        assert job == "7"
        return dict(fields)

    monkeypatch.setattr(commands, "job_fields", job_fields)
    monkeypatch.setattr(commands, "config", dict)
    monkeypatch.setattr(maintenance, "fit_next_job", lambda *_: None)
    return fields


@pytest.fixture
def stays(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """For which jobs the launcher stayed."""
    stayed: list[str] = []

    def stay(job: str) -> float:
        stayed.append(job)
        return 12.0

    monkeypatch.setattr(preemption, "stay_until_ended", stay)
    return stayed


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """A chain that has begun; its successor is job 8, unless ``submit`` says otherwise."""
    path = run_directory.open_run(tmp_path / "run").path

    def start(chained: bool = True, submit: Callable[..., slurm_chain.Link] | None = None) -> Chain:
        monkeypatch.setattr(slurm_chain, "submit_successor", submit or (lambda *_: slurm_chain.Link(2, "8")))
        options = LaunchOptions("true", "command", str(path), chain=chained)
        begun = Chain(options, Site(SiteMode.BATCH, "7", ("n1", "n2"), True), path, Ledger(path / "ledger", "7-test"))
        assert begun.judge_predecessor() is None
        begun.begin()
        return begun

    return start


def preempt(state: dict[str, str]) -> None:
    state.update(PreemptTime="1795277400", EndTime="1795277415")


@pytest.mark.parametrize("verdict", ["terminated", "time_limit"])
def test_a_job_that_is_preempted_stays_for_slurm_to_requeue_it(
    verdict: str, begin: Begin, state: dict[str, str], stays: list[str]
) -> None:
    chain = begin(chained=False)
    preempt(state)
    chain.close({"verdict": verdict})
    assert chain.next_job == "7"
    chain.leave()
    assert stays == ["7"]


def test_with_a_successor_nobody_stays(begin: Begin, state: dict[str, str], stays: list[str]) -> None:
    chain = begin()
    preempt(state)
    chain.close({"verdict": "terminated"})
    assert chain.next_job == "8"
    chain.leave()
    assert stays == []


@pytest.mark.parametrize(("name", "job_state"), [("terminated", "CANCELLED"), ("completed", "RUNNING")])
def test_nobody_stays_after_the_users_cancel_or_when_all_is_done(
    name: str, job_state: str, begin: Begin, state: dict[str, str], stays: list[str]
) -> None:
    chain = begin(chained=False)
    preempt(state)
    state["JobState"] = job_state
    chain.close({"verdict": name})
    assert chain.next_job is None
    chain.leave()
    assert stays == []


def test_where_no_successor_may_be_queued_the_job_requeues_itself_and_does_not_stay(
    begin: Begin, state: dict[str, str], stays: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> slurm_chain.Link:
        raise SubmitLimit("QOSMaxSubmitJobPerUserLimit")

    requeued: list[str] = []
    monkeypatch.setattr(commands, "requeue", requeued.append)
    chain = begin(submit=refuse)
    preempt(state)
    chain.close({"verdict": "terminated"})
    assert chain.next_job == "7"
    chain.leave()
    assert (requeued, stays) == (["7"], [])


def step_of(path: Path, leads: bool, chained: bool = False) -> Chain:
    options = LaunchOptions("true", "command", str(path), chain=chained)
    site = Site(SiteMode.STEP, "7", ("n1", "n2"), leads)
    return Chain(options, site, path, Ledger(path / "ledger", f"7-test-{leads}"))


@pytest.mark.parametrize("before", [None, "completed"])
def test_the_other_tasks_of_a_step_wait_for_what_the_first_one_decides(
    before: str | None, tmp_path: Path, state: dict[str, str]
) -> None:
    path = run_directory.open_run(tmp_path / "run").path
    answers: list[str | None] = []
    follower = threading.Thread(target=lambda: answers.append(step_of(path, False).judge_predecessor()))
    follower.start()
    until((path / "links" / "7.ready").exists, "the other task", alive=follower.is_alive)
    assert not answers
    if before is not None:
        run_directory.write_verdict(path, "7", {"verdict": before, "reason": "all is done"})
    else:
        assert step_of(path, True).judge_predecessor() is None
    follower.join(PATIENCE_S)
    assert answers == ["all is done" if before else None]


def test_the_other_tasks_of_a_step_end_when_the_first_one_does(
    tmp_path: Path, state: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> slurm_chain.Link:
        raise SlurmError("Invalid account")

    path = run_directory.open_run(tmp_path / "run").path
    monkeypatch.setattr(slurm_chain, "submit_successor", refuse)
    with pytest.raises(UsageError):
        step_of(path, True, chained=True).judge_predecessor()
    over = step_of(path, False).judge_predecessor()
    assert over is not None
    assert "Invalid account" in over


# -- the beginning -------------------------------------------------------------------------------------------------


def test_the_successor_is_queued_before_the_wait_for_nodes_of_the_part_before(
    begin: Begin, state: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    happened: list[str] = []
    before = run_claim.Turn(1, "6", "6", 1, ("n1",), -1, 0.0)
    assert run_claim.take(run_directory.open_run(tmp_path / "run").path, before)
    monkeypatch.setattr(chaining, "gather", lambda *_: PredecessorEvidence("6", chained=True, state="NODE_FAIL"))

    def wait(path: Path, before: run_claim.Turn, limit_s: float, say: object, ended: bool, other_job: bool) -> float:
        assert (before.part, ended, other_job) == ("6", False, True)
        newest = run_directory.newest_epoch(path)
        assert newest is not None
        assert newest.job == "7-begins"
        happened.append("waited")
        return 0.0

    def submit(*_: object) -> slurm_chain.Link:
        happened.append("submitted")
        return slurm_chain.Link(2, "8")

    monkeypatch.setattr(fencing, "wait_for_predecessor", wait)
    begin(submit=submit)
    assert happened == ["submitted", "waited"]


def test_a_slurm_that_does_not_answer_at_the_start_is_asked_again(
    begin: Begin, state: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    answers: list[Exception | None] = [Unanswered("Socket timed out"), Unanswered("away"), None]

    def submit(*_: object) -> slurm_chain.Link:
        error = answers.pop(0)
        if error is not None:
            raise error
        return slurm_chain.Link(2, "8")

    chain = begin(submit=submit)
    assert "the next job is submitted as soon as it does" in capfd.readouterr().err
    chain.successor.tick(1000.0, None)
    assert chain.successor.job is None
    chain.successor.tick(1000.0 + successor.UNANSWERED_RETRY_S - 1, None)
    assert len(answers) == 1  # not at every tick
    chain.successor.tick(1000.0 + successor.UNANSWERED_RETRY_S, None)
    assert chain.successor.job == "8"
    assert not chain.successor.late


def test_what_slurm_refuses_for_good_ends_the_launch_at_once(begin: Begin, state: dict[str, str]) -> None:
    def submit(*_: object) -> slurm_chain.Link:
        raise SlurmError("sbatch: error: Invalid account")

    with pytest.raises(UsageError, match="Invalid account"):
        begin(submit=submit)


def test_a_job_that_requeues_itself_waits_for_slurm(
    begin: Begin, state: dict[str, str], stays: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> slurm_chain.Link:
        raise Unanswered("away")

    tries: list[str] = []

    def requeue(job: str) -> None:
        tries.append(job)
        if len(tries) < 3:
            raise Unanswered("away")

    monkeypatch.setattr(commands, "requeue", requeue)
    chain = begin(submit=away)
    chain.close({"verdict": "time_limit"})
    chain.leave(poll_s=0.0)
    assert tries == ["7"] * 3


def test_a_submission_that_hangs_is_not_begun_twice_and_the_end_waits_for_it(
    begin: Begin, state: dict[str, str]
) -> None:
    under_way, answered, calls = threading.Event(), threading.Event(), []

    def submit(*_: object) -> slurm_chain.Link:
        calls.append(1)
        if len(calls) == 1:
            raise Unanswered("away")
        under_way.set()
        assert answered.wait(PATIENCE_S)
        return slurm_chain.Link(2, "8")

    chain = begin(submit=submit)
    first = threading.Thread(target=chain.successor.tick, args=(1000.0, None))
    first.start()
    assert under_way.wait(PATIENCE_S)
    chain.successor.tick(5000.0, None)
    assert len(calls) == 2
    end = threading.Thread(target=chain.leave)
    end.start()
    answered.set()
    first.join(PATIENCE_S)
    end.join(PATIENCE_S)
    assert chain.successor.job == "8"


# -- what a person orders ------------------------------------------------------------------------------------------

STOP = ChainOrder(stopped=True, by="me", time=1.0)


def test_a_stop_that_comes_while_the_successor_is_submitted_is_not_lost(
    begin: Begin, state: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled: list[str] = []
    monkeypatch.setattr(commands, "cancel", cancelled.append)

    def submit(path: Path, *_: object) -> slurm_chain.Link:
        chain_order.write(path, STOP)
        return slurm_chain.Link(2, "8")

    chain = begin(submit=submit)
    assert (cancelled, chain.successor.job) == (["8"], None)
    assert chain.heed(STOP)
    chain.close({"verdict": "terminated"})
    assert chain.next_job is None


def test_after_a_stop_nothing_is_submitted_or_requeued_whatever_the_verdict(
    begin: Begin, state: dict[str, str], stays: list[str], tmp_path: Path
) -> None:
    answers: list[Exception] = [Unanswered("away")]

    def submit(*_: object) -> slurm_chain.Link:
        raise answers.pop()

    chain = begin(submit=submit)
    chain_order.write(tmp_path / "run", STOP)
    chain.successor.tick(1e9, None)
    chain.close({"verdict": "time_limit"})
    assert chain.next_job is None
    chain.leave()
    assert (stays, answers) == ([], [])


def test_the_last_job_of_a_chain_submits_one_more_when_more_are_allowed(
    begin: Begin, state: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept: list[str] = []
    monkeypatch.setattr(slurm_chain, "describe_successor", lambda path, job, nodes, program: kept.append(job))
    chain_order.write(run_directory.open_run(tmp_path / "run").path, ChainOrder(limit=1))
    chain = begin()
    assert (chain.active, chain.successor.job, kept) == (False, None, ["7"])
    assert not chain.heed(ChainOrder(limit=1))
    chain.successor.tick(1000.0, None)
    assert chain.successor.job is None
    assert not chain.heed(ChainOrder(limit=2))
    chain.successor.tick(1000.0, None)
    assert (chain.active, chain.successor.job) == (True, "8")


def test_a_damaged_order_orders_nothing(tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    for text in ("", "{}", "[]", '{"stopped": "yes", "limit": -1, "time": "x"}', '{"limit": true}'):
        (tmp_path / "links" / "order.json").write_text(text)
        assert chain_order.read(tmp_path) == ChainOrder()
