"""Slurm's word for how a part ended, where a job has several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.launch.allocation.placements import Site, SiteMode
from resilio_hpc.launch.chain.predecessor import gather, part_state
from resilio_hpc.launch.rundir import run_claim, run_directory
from resilio_hpc.slurm.client import commands
from resilio_hpc.slurm.client.commands import PartEnd

REQUEUED, BY_USER = PartEnd("REQUEUED"), PartEnd("CANCELLED", "20001")


@pytest.mark.parametrize(
    ("part", "state", "restarts", "accounted", "expected"),
    [
        ("7", "TIMEOUT", 0, [PartEnd("TIMEOUT")], ("TIMEOUT", "")),
        ("7", "CANCELLED", 0, [BY_USER], ("CANCELLED", "20001")),
        ("7", "CANCELLED", 0, [], ("CANCELLED", "")),
        ("7", "PENDING", 1, [PartEnd("PREEMPTED"), PartEnd("PENDING")], ("PREEMPTED", "")),
        ("7", "PENDING", 1, [], ("REQUEUED", "")),
        ("7r1", "FAILED", 1, [REQUEUED, PartEnd("FAILED")], ("FAILED", "")),
        # cancelled while it waited to run again
        ("7", "CANCELLED", 1, [REQUEUED, BY_USER], ("CANCELLED", "20001")),
        ("7", "CANCELLED", 1, [], ("CANCELLED", "")),
        ("7", "", 0, [REQUEUED, BY_USER], ("CANCELLED", "20001")),  # purged from slurmctld
        ("7", "", 0, [REQUEUED, PartEnd("FAILED")], ("REQUEUED", "")),
        ("7", "", 0, [], ("UNKNOWN", "")),
    ],
)
def test_how_a_part_ended(
    part: str,
    state: str,
    restarts: int,
    accounted: list[PartEnd],
    expected: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = {"JobState": state, "Restarts": str(restarts)} if state else {}
    monkeypatch.setattr(commands, "job_fields", lambda _: fields)
    monkeypatch.setattr(commands, "accounted_ends", lambda _: accounted)
    assert part_state(part) == expected


TOO_SHORT = {"verdict": "time_limit", "trained": False}


@pytest.mark.parametrize(
    ("parts", "fruitless"),
    [
        ([None, None, None], 3),
        ([TOO_SHORT, TOO_SHORT, TOO_SHORT], 3),
        ([TOO_SHORT, None, TOO_SHORT], 3),
        ([TOO_SHORT, {"verdict": "time_limit", "trained": True}, TOO_SHORT], 1),
        ([TOO_SHORT, TOO_SHORT, {"verdict": "time_limit"}], 0),  # of an older version
        ([TOO_SHORT, TOO_SHORT, {"verdict": "terminated", "trained": False}], 0),  # preempted while it started
    ],
)
def test_how_many_jobs_in_a_row_were_of_no_use(
    parts: list[dict[str, Any] | None], fruitless: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "job_fields", lambda _: {"JobState": "COMPLETED", "Restarts": "0"})
    path = run_directory.open_run(tmp_path / "run").path
    for number, verdict in enumerate(parts, 1):
        assert run_claim.take(path, run_claim.Turn(number, str(number), str(number), number, ("n1",), -1, 0.0))
        if verdict is not None:
            run_directory.write_verdict(path, str(number), verdict)
    last = run_claim.newest(path)[0]
    assert gather(path, last, Site(SiteMode.BATCH, "9", ("n1",), True), last.job).fruitless == fruitless
