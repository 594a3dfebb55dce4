"""The evaluator: goes down a ranking until Slurm takes a choice. RES-21.

At most one of its jobs is in the queue at a time: the next choice is tried when the last one is known to be cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from resilio_hpc.autoparallel.search.choice import Choice
from resilio_hpc.autoparallel.search.inventory import WAITS_FOR_NODES
from resilio_hpc.core.errors import SlurmError
from resilio_hpc.slurm.client.slurm_errors import SubmitLimit, Unanswered
from resilio_hpc.slurm.submit.expected_start import Expected
from resilio_hpc.slurm.submit.trial import JobLook, SubmitRequest

Event = Literal["passed", "would-submit", "submitted", "started", "queued", "taken-back"]
LOST = frozenset({"BOOT_FAIL", "DEADLINE", "NODE_FAIL"})  # it may have begun to start; its nodes ended it
NOW_S = 15.0
"""A start within this time is one now: clocks of two machines, and Slurm's own rounding."""


@dataclass(frozen=True)
class WaitLimits:
    """Limits of waiting. ``max_wait_s``: how far in the future the start may lie.

    ``settle_s``: how long Slurm may take to start a job for which it has room (a pass of its backfill scheduler is 30 s
    by default).
    """

    max_wait_s: float = 0.0
    settle_s: float = 60.0


@dataclass(frozen=True)
class Attempt:
    """One attempt, for a line.

    ``rank``: place in the ranking, from 1; ``wait_s``: until the start that Slurm expects, None where it expects none.
    """

    rank: int
    layout: str
    partition: str
    nodes: int
    gpus_per_node: int
    event: Event
    why: str
    wait_s: float | None = None
    job: str = ""


@dataclass(frozen=True)
class Verdict:
    """The next act: "go" on with this choice, "next" one, or "look" again."""

    act: Literal["go", "next", "look"]
    why: str = ""
    event: Event = "passed"


def shapes_once(choices: Sequence[Choice]) -> Iterator[tuple[int, Choice]]:
    """(rank, choice) with the best layout of each shape: Slurm's answer does not depend on the layout."""
    seen = set()
    for rank, choice in enumerate(choices, 1):
        shape = tuple(sorted(choice.sbatch_options().items()))
        if shape not in seen:
            seen.add(shape)
            yield rank, choice


def wait_s(expected: Expected, now: float) -> float | None:
    """Return the seconds until the start, 0 for one now; None for never."""
    if expected.start_s is None:
        return None
    left = expected.start_s - now
    return left if left > NOW_S else 0.0


def after_test(expected: Expected, now: float, patience: WaitLimits) -> Verdict:
    """Return whether a choice is worth submitting."""
    wait = wait_s(expected, now)
    if wait is None:
        return Verdict("next", expected.why or "Slurm would never start it")
    if wait > patience.max_wait_s:
        return Verdict("next", f"it would start in {wait:.0f} s, at most {patience.max_wait_s:.0f} s are acceptable")
    return Verdict("go", "it can start now" if not wait else f"it would start in {wait:.0f} s")


def must_ask(look: JobLook) -> bool:
    """Return whether the scheduler has passed the job over, so that another test is worth it."""
    return look.state == "PENDING" and look.reason != ""


def after_submit(
    look: JobLook, expected: Expected | None, now: float, since_submit_s: float, patience: WaitLimits
) -> Verdict:
    """Return the meaning of a look at the submitted job. ``expected``: the answer of a second test, if any."""
    if look.state == "CANCELLED":
        return Verdict("go", "it was cancelled from outside", "taken-back")
    if look.state in LOST:
        return Verdict("next", f"its nodes failed: {look.state}", "taken-back")
    if look.state not in ("PENDING", "UNKNOWN"):
        return Verdict("go", f"on {look.nodes}" if look.nodes else look.state, "started")
    if expected is not None:
        verdict, wait = after_test(expected, now, patience), wait_s(expected, now)
        if verdict.act == "next":
            return Verdict("next", f"its nodes are gone: {verdict.why}", "taken-back")
        if wait:
            return Verdict("go", verdict.why, "queued")
    if since_submit_s < patience.settle_s or look.state == "UNKNOWN":
        return Verdict("look")
    if look.reason in WAITS_FOR_NODES and since_submit_s < patience.max_wait_s:
        return Verdict("go", "it waits for its turn", "queued")
    return Verdict(
        "next", f"it did not start within {since_submit_s:.0f} s: {look.reason or 'no reason'}", "taken-back"
    )


POLL_S = 2.0
SILENCE_S = 120.0
"""How long slurmctld may say nothing of a job that it has taken."""


class Scheduler(Protocol):
    """The methods of ``slurm.submit.trial.Trials``."""

    def expected(self, request: SubmitRequest) -> Expected:
        """Return when it would start."""

    def submit(self, request: SubmitRequest) -> str:
        """Return the job's number."""

    def look(self, job: str) -> JobLook:
        """Return the state of the submitted job."""

    def take_back(self, job: str) -> None:
        """Cancel it if it still waits."""


@dataclass(frozen=True)
class WallClock:
    """Unix seconds, and a way to let time pass."""

    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class Evaluator:
    """Tries choices. ``prepare``: turns a choice into a job; ``tell``: is called with every attempt."""

    prepare: Callable[[Choice], SubmitRequest]
    tell: Callable[[Attempt], None]
    scheduler: Scheduler
    patience: WaitLimits
    clock: WallClock = field(default_factory=WallClock)

    def run(self, choices: Sequence[Choice], dry_run: bool = False) -> Attempt | None:
        """Return the last attempt: started, queued, or would-submit; None where no choice is left.

        Raises SlurmError where Slurm does not answer, or takes no more jobs of this user at all.
        """
        for rank, choice in shapes_once(choices):
            request = self.prepare(choice)
            expected = self.scheduler.expected(request)
            verdict = after_test(expected, self.clock.now(), self.patience)
            wait = wait_s(expected, self.clock.now())
            if verdict.act == "next" or dry_run:
                event: Event = "passed" if verdict.act == "next" else "would-submit"
                told = self._told(rank, choice, event, verdict.why, wait)
            else:
                told = self._submit(rank, choice, request, wait)
            if told.event in ("started", "queued", "would-submit"):
                return told
        return None

    def _told(
        self, rank: int, choice: Choice, event: Event, why: str, wait: float | None = None, job: str = ""
    ) -> Attempt:
        shape = choice.offer.shape
        attempt = Attempt(
            rank, str(choice.layout), choice.offer.partition, shape.nodes, shape.ranks_per_node, event, why, wait, job
        )
        self.tell(attempt)
        return attempt

    def _submit(self, rank: int, choice: Choice, request: SubmitRequest, wait: float | None) -> Attempt:
        try:
            job = self.scheduler.submit(request)
        except (Unanswered, SubmitLimit):
            raise
        except SlurmError as error:
            return self._told(rank, choice, "passed", str(error), wait)
        self._told(
            rank, choice, "submitted", "it can start now" if not wait else f"expected in {wait:.0f} s", wait, job
        )
        verdict = self._settled(job, request)
        if verdict.act == "next":
            verdict = self._taken_back(job, verdict)
        elif verdict.event == "taken-back":
            raise SlurmError(f"job {job} was cancelled from outside while it waited: nothing more is submitted")
        return self._told(rank, choice, verdict.event, verdict.why, job=job)

    def _settled(self, job: str, request: SubmitRequest) -> Verdict:
        """Look at the job until it has started, is known to start in time, or is known not to."""
        submitted = self.clock.now()
        while True:
            look = self.scheduler.look(job)
            expected = self._asked(request) if must_ask(look) else None
            now = self.clock.now()
            verdict = after_submit(look, expected, now, now - submitted, self.patience)
            if verdict.act != "look":
                return verdict
            if look.state == "UNKNOWN" and now - submitted > max(SILENCE_S, self.patience.settle_s):
                raise Unanswered(f"job {job} was submitted, and Slurm tells nothing of it: look with squeue -j {job}")
            self.clock.sleep(POLL_S)

    def _asked(self, request: SubmitRequest) -> Expected | None:
        try:
            return self.scheduler.expected(request)
        except Unanswered:
            return None

    def _taken_back(self, job: str, verdict: Verdict) -> Verdict:
        """Cancel a waiting job; one that started meanwhile is kept. The next choice waits until this is certain."""
        began = self.clock.now()
        while True:
            try:
                self.scheduler.take_back(job)
            except Unanswered:
                pass
            look = self.scheduler.look(job)
            if look.state == "CANCELLED" or look.state in LOST:
                return verdict
            if look.state not in ("PENDING", "UNKNOWN"):
                return Verdict("go", f"on {look.nodes}, while it was being taken back", "started")
            if self.clock.now() - began > SILENCE_S:
                raise Unanswered(f"job {job} could not be cancelled and may start yet: scancel {job}")
            self.clock.sleep(POLL_S)
