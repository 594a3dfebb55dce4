"""The walk down the ranking: what is tried, what is taken, and that no two jobs are ever in the queue. RES-21."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from resilio_hpc.autoparallel.base.layout import Layout
from resilio_hpc.autoparallel.base.shapes import Shape
from resilio_hpc.autoparallel.search.choice import Choice, Offer
from resilio_hpc.autoparallel.search.evaluate import (
    SILENCE_S,
    Attempt,
    Evaluator,
    WaitLimits,
    WallClock,
    after_submit,
    after_test,
    shapes_once,
)
from resilio_hpc.core.errors import SlurmError
from resilio_hpc.slurm.client.slurm_errors import SubmitLimit, Unanswered
from resilio_hpc.slurm.submit.expected_start import Expected
from resilio_hpc.slurm.submit.trial import JobLook, SubmitRequest

NOW = 1_000_000.0
STARTS = Expected(NOW, ("n1",), "main")
NEVER = Expected(None, why="Requested node configuration is not available")


def choice(nodes: int, tp: int = 1, per_node: int = 2) -> Choice:
    layout = Layout(tp=tp, dp=nodes * per_node // tp, global_batch=64)
    return Choice(Offer(Shape(nodes, per_node), "main", ""), layout, 1.0, 0.9, 1.1, 0.4, 0.0, 0.1, 1e9, 2e9)


@dataclass
class FakeScheduler:
    """Answers from lists, one per size of job; whatever was not foreseen is an error. Time passes in ``sleep`` alone.

    ``looks``: of each job, the last one stays. ``cancelled``: what a job is after it was taken back."""

    tests: dict[str, list[Expected | SlurmError]]
    looks: dict[str, list[JobLook]]
    refuses: dict[str, SlurmError] = field(default_factory=dict)
    cancelled: dict[str, list[JobLook | SlurmError]] = field(default_factory=dict)
    time: float = NOW
    submitted: list[str] = field(default_factory=list)
    taken_back: list[str] = field(default_factory=list)

    def expected(self, request: SubmitRequest) -> Expected:
        answers = self.tests[request.script]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, SlurmError):
            raise answer
        return answer

    def submit(self, request: SubmitRequest) -> str:
        if request.script in self.refuses:
            raise self.refuses[request.script]
        assert set(self.submitted) <= set(self.taken_back), "two jobs at a time"
        self.submitted.append(request.script)
        return request.script

    def look(self, job: str) -> JobLook:
        if job in self.taken_back and job in self.cancelled:
            looks: Sequence[JobLook | SlurmError] = self.cancelled[job]
        elif job in self.taken_back:
            return JobLook("CANCELLED")
        else:
            looks = self.looks[job]
        look = looks[0] if len(looks) == 1 else list.pop(looks, 0)  # type: ignore[arg-type]
        assert isinstance(look, JobLook)
        return look

    def take_back(self, job: str) -> None:
        self.taken_back.append(job)

    def sleep(self, seconds: float) -> None:
        self.time += seconds


def walk(
    scheduler: FakeScheduler, sizes: Sequence[int], patience: WaitLimits | None = None, dry_run: bool = False
) -> tuple[Attempt | None, list[str]]:
    """What it ended with, and a word for each attempt: ``2 submitted``."""
    told: list[Attempt] = []
    prepare: Callable[[Choice], SubmitRequest] = lambda one: SubmitRequest(str(one.offer.shape.nodes), (), {})  # noqa: E731
    clock = WallClock(lambda: scheduler.time, scheduler.sleep)
    evaluator = Evaluator(prepare, told.append, scheduler, patience or WaitLimits(), clock)
    last = evaluator.run([choice(size) for size in sizes], dry_run)
    return last, [f"{attempt.nodes} {attempt.event}" for attempt in told]


def test_the_best_choice_that_can_start_is_taken() -> None:
    scheduler = FakeScheduler(
        {"8": [NEVER], "4": [STARTS]}, {"4": [JobLook("PENDING"), JobLook("RUNNING", "", "n[1-4]")]}
    )
    last, told = walk(scheduler, [8, 4, 2])
    assert told == ["8 passed", "4 submitted", "4 started"]
    assert last is not None and (last.rank, last.job, last.why) == (2, "4", "on n[1-4]")
    assert scheduler.taken_back == []


def test_nodes_that_vanish_between_test_and_submission_leave_the_turn_to_the_next() -> None:
    drained = FakeScheduler(
        {"8": [STARTS, NEVER], "4": [STARTS]},
        {
            "8": [JobLook("PENDING"), JobLook("PENDING", "ReqNodeNotAvail, UnavailableNodes:n8")],
            "4": [JobLook("RUNNING")],
        },
    )
    assert walk(drained, [8, 4])[1] == ["8 submitted", "8 taken-back", "4 submitted", "4 started"]
    assert (drained.taken_back, drained.time - NOW) == (["8"], 2.0)

    later = Expected(NOW + 3600, ("n1",), "main")
    taken = FakeScheduler(
        {"8": [STARTS, later], "4": [STARTS]}, {"8": [JobLook("PENDING", "Resources")], "4": [JobLook("RUNNING")]}
    )
    last, told = walk(taken, [8, 4])
    assert told == ["8 submitted", "8 taken-back", "4 submitted", "4 started"] and last is not None


def test_a_start_in_the_future_is_accepted_as_far_as_it_was_allowed() -> None:
    later = Expected(NOW + 600, ("n1",), "main")

    def scheduler() -> FakeScheduler:
        return FakeScheduler({"8": [later]}, {"8": [JobLook("PENDING", "Resources")]})

    assert walk(scheduler(), [8]) == (None, ["8 passed"])
    last, told = walk(scheduler(), [8], WaitLimits(max_wait_s=900))
    assert told == ["8 submitted", "8 queued"]
    assert last is not None and "600 s" in last.why
    assert walk(scheduler(), [8], WaitLimits(max_wait_s=599))[1] == ["8 passed"]


def test_a_job_that_waits_for_a_limit_is_taken_back_when_slurm_had_its_time() -> None:
    scheduler = FakeScheduler({"8": [STARTS]}, {"8": [JobLook("PENDING", "AssocGrpNodeLimit")]})
    last, told = walk(scheduler, [8], WaitLimits(max_wait_s=900, settle_s=30))
    assert (last, told) == (None, ["8 submitted", "8 taken-back"])
    assert 30 <= scheduler.time - NOW <= 33


def test_a_job_that_starts_while_it_is_taken_back_is_kept() -> None:
    scheduler = FakeScheduler(
        {"8": [STARTS, NEVER], "4": [STARTS]},
        {"8": [JobLook("PENDING", "Resources")]},
        cancelled={"8": [JobLook("PENDING"), JobLook("RUNNING", "", "n[1-8]")]},
    )
    last, told = walk(scheduler, [8, 4])
    assert told == ["8 submitted", "8 started"] and last is not None
    assert scheduler.submitted == ["8"]


def test_a_node_that_fails_while_the_job_starts_leaves_the_turn_to_the_next() -> None:
    scheduler = FakeScheduler(
        {"8": [STARTS], "4": [STARTS]},
        {"8": [JobLook("NODE_FAIL")], "4": [JobLook("RUNNING")]},
        cancelled={"8": [JobLook("NODE_FAIL")]},
    )
    assert walk(scheduler, [8, 4])[1] == ["8 submitted", "8 taken-back", "4 submitted", "4 started"]


def test_nothing_more_is_submitted_when_a_jobs_fate_is_not_known() -> None:
    silent = FakeScheduler({"8": [STARTS], "4": [STARTS]}, {"8": [JobLook("UNKNOWN")]})
    with pytest.raises(Unanswered, match="job 8 was submitted, and Slurm tells nothing of it"):
        walk(silent, [8, 4])
    assert silent.submitted == ["8"] and silent.time - NOW > SILENCE_S

    unsure = FakeScheduler({"8": [STARTS], "4": [STARTS]}, {}, refuses={"8": Unanswered("sbatch: no answer")})
    with pytest.raises(Unanswered):
        walk(unsure, [8, 4])

    stuck = FakeScheduler(
        {"8": [STARTS, NEVER], "4": [STARTS]},
        {"8": [JobLook("PENDING", "Resources")]},
        cancelled={"8": [JobLook("UNKNOWN")]},
    )
    with pytest.raises(Unanswered, match="may start yet: scancel 8"):
        walk(stuck, [8, 4])
    assert stuck.submitted == ["8"]

    foreign = FakeScheduler({"8": [STARTS], "4": [STARTS]}, {"8": [JobLook("PENDING"), JobLook("CANCELLED")]})
    with pytest.raises(SlurmError, match="cancelled from outside"):
        walk(foreign, [8, 4])


def test_a_silence_while_the_job_waits_is_no_answer() -> None:
    scheduler = FakeScheduler(
        {"8": [STARTS, Unanswered("away"), STARTS]},
        {"8": [JobLook("PENDING", "Priority"), JobLook("UNKNOWN"), JobLook("PENDING", "Priority"), JobLook("RUNNING")]},
    )
    assert walk(scheduler, [8])[1] == ["8 submitted", "8 started"]


def test_a_refused_choice_is_passed_but_a_limit_on_jobs_ends_it() -> None:
    refused = FakeScheduler(
        {"8": [STARTS], "4": [STARTS]}, {"4": [JobLook("RUNNING")]}, refuses={"8": SlurmError("sbatch refused the job")}
    )
    assert walk(refused, [8, 4])[1] == ["8 passed", "4 submitted", "4 started"]
    with pytest.raises(SubmitLimit):
        walk(FakeScheduler({"8": [STARTS]}, {}, refuses={"8": SubmitLimit("AssocMaxSubmitJobLimit")}), [8])


def test_a_dry_run_submits_nothing() -> None:
    scheduler = FakeScheduler({"8": [NEVER], "4": [STARTS]}, {})
    last, told = walk(scheduler, [8, 4, 2], dry_run=True)
    assert told == ["8 passed", "4 would-submit"] and last is not None
    assert scheduler.submitted == []


def test_a_shape_is_tried_once_with_its_best_layout() -> None:
    ranking = [choice(4, tp=2), choice(4, tp=1), choice(2), choice(4, tp=4), choice(2, per_node=1)]
    assert [(rank, one.layout.tp) for rank, one in shapes_once(ranking)] == [(1, 2), (3, 1), (5, 1)]


def test_clocks_that_differ_a_little_do_not_make_now_a_wait() -> None:
    assert after_test(Expected(NOW + 10), NOW, WaitLimits()).act == "go"
    assert after_test(Expected(NOW - 10), NOW, WaitLimits()).act == "go"
    assert after_test(Expected(NOW + 20), NOW, WaitLimits()).act == "next"


def test_a_job_whose_turn_is_near_stays_in_the_queue_where_waiting_is_allowed() -> None:
    look = JobLook("PENDING", "Priority")
    assert after_submit(look, STARTS, NOW, 61, WaitLimits(900, 60)).event == "queued"
    assert after_submit(look, STARTS, NOW, 61, WaitLimits(0, 60)).act == "next"
    assert after_submit(look, STARTS, NOW, 59, WaitLimits(0, 60)).act == "look"
