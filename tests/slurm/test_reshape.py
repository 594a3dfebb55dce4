"""A waiting job of ours gets another shape; nothing else does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from resilio_hpc.core.errors import SlurmError, UsageError
from resilio_hpc.slurm.client.slurm_errors import Unanswered
from resilio_hpc.slurm.orders.reshape import JobShape, changes, reshape

RUN = Path("/shared/run")
WAITS = {
    "JobId": "8", "UserId": f"me({os.geteuid()})", "JobState": "PENDING", "Command": "/shared/run/batch-7.sh a b",
    "NumNodes": "4-4", "NumTasks": "8", "NumCPUs": "16", "NtasksPerN:B:S:C": "2:0:*:*", "TimeLimit": "1-00:00:00",
    "ExcNodeList": "n[3-4]", "Features": "(null)",
}  # fmt: skip


class FakeSlurm:
    """One job; raises on any other."""

    def __init__(self, fields: Mapping[str, str], error: SlurmError | None = None, starts: bool = False) -> None:
        self.fields = dict(fields)
        self.orders: list[dict[str, str]] = []
        self._error, self._starts = error, starts

    def look(self, job: str) -> Mapping[str, str]:
        assert job == "8"
        return dict(self.fields)

    def update_job(self, job: str, changes: Mapping[str, str]) -> None:
        assert job == "8"
        self.orders.append(dict(changes))
        if self._starts:
            self.fields["JobState"] = "RUNNING"
        if self._error is not None:
            raise self._error
        self.fields |= changes
        if "TimeLimit" in changes:
            self.fields["TimeLimit"] = f"00:{int(changes['TimeLimit']):02d}:00"


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        (JobShape(), {}),
        (JobShape(nodes=4, time_limit_s=86400, exclude=["n4", "n3"], features=""), {}),
        (JobShape(nodes=2), {"NumNodes": "2-2", "NumTasks": "4", "NumCPUs": "8"}),
        (JobShape(nodes=6), {"NumNodes": "6-6", "NumTasks": "12", "NumCPUs": "24"}),
        (JobShape(time_limit_s=3661), {"TimeLimit": "61"}),
        (JobShape(exclude=["n1", "n2"]), {"ExcNodeList": "n[1-2]"}),
        (JobShape(exclude=[]), {"ExcNodeList": ""}),
        (JobShape(features="h100"), {"Features": "h100"}),
    ],
)
def test_only_what_differs_is_changed(shape: JobShape, wanted: dict[str, str]) -> None:
    assert changes(WAITS, shape) == wanted


@pytest.mark.parametrize(
    "shape",
    [JobShape(nodes=0), JobShape(time_limit_s=30), JobShape(time_limit_s=float("nan")), JobShape(exclude=["ALL"])],
)
def test_an_impossible_shape_is_refused_before_slurm_hears_of_it(shape: JobShape) -> None:
    with pytest.raises(UsageError):
        changes(WAITS, shape)


def test_a_job_that_counts_its_gpus_in_all_keeps_its_nodes() -> None:
    with pytest.raises(UsageError, match="per node"):
        changes(WAITS | {"TresPerJob": "gres:gpu:8"}, JobShape(nodes=2))


def test_every_order_holds_what_slurm_refuses_for_a_job_that_has_started() -> None:
    slurm = FakeSlurm(WAITS)
    assert reshape("8", JobShape(time_limit_s=600), RUN, slurm, slurm.look).result == "done"
    assert slurm.orders == [{"TimeLimit": "10", "ExcNodeList": "n[3-4]"}]


@pytest.mark.parametrize(
    ("fields", "result"),
    [
        ({}, "unanswered"),
        (WAITS | {"UserId": "other(4711)"}, "foreign"),
        (WAITS | {"Command": "/shared/run2/batch-7.sh"}, "foreign"),
        (WAITS | {"Command": "/home/me/job.sh"}, "foreign"),
        (WAITS | {"JobState": "RUNNING"}, "started"),
        (WAITS | {"JobState": "CANCELLED"}, "started"),
    ],
)
def test_what_is_not_ours_or_does_not_wait_is_left_alone(fields: dict[str, str], result: str) -> None:
    slurm = FakeSlurm(fields)
    assert reshape("8", JobShape(nodes=2), RUN, slurm, slurm.look).result == result
    assert slurm.orders == []


def test_a_job_that_starts_in_between_is_said_to_have_started() -> None:
    slurm = FakeSlurm(WAITS, SlurmError("Job is no longer pending execution"), starts=True)
    outcome = reshape("8", JobShape(nodes=2), RUN, slurm, slurm.look)
    assert (outcome.result, outcome.fits) == ("started", False)


def test_silence_is_not_taken_for_success() -> None:
    slurm = FakeSlurm(WAITS, Unanswered("Socket timed out"))
    assert reshape("8", JobShape(nodes=2), RUN, slurm, slurm.look).result == "unanswered"


def test_what_slurm_made_of_an_order_is_looked_at() -> None:
    slurm = FakeSlurm(WAITS)
    outcome = reshape("8", JobShape(nodes=2), RUN, slurm, lambda job: dict(WAITS))
    assert outcome.result == "refused"


def test_a_dry_run_orders_nothing() -> None:
    slurm = FakeSlurm(WAITS)
    outcome = reshape("8", JobShape(nodes=2), RUN, slurm, slurm.look, dry_run=True)
    assert (outcome.result, slurm.orders) == ("would", [])
    assert outcome.changes["NumNodes"] == "2-2"
