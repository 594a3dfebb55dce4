"""Slurm's word for how a part ended, where a job has several runs."""

from __future__ import annotations

import pytest

from resilio_hpc.launch.predecessor import part_state
from resilio_hpc.slurm import commands
from resilio_hpc.slurm.commands import PartEnd

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
