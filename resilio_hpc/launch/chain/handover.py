"""The record of a job's part that was closed from outside the batch script: by whom, why, and what follows.

Slurm says CANCELLED of a job that the launcher itself cancels, since no agent was left to end it. The record is written
first and durably, so that the next job never takes that for its user's wish.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from msgspec import Struct, to_builtins

from resilio_hpc.core import trusted_files
from resilio_hpc.core.durable import create_exclusive
from resilio_hpc.core.json_fields import Fields


class Handover(Struct, frozen=True):
    """The record. ``part``: the job's part that was closed; ``by``: the node that did it; ``time``: Unix seconds."""

    part: str
    by: str
    reason: str
    carries_on: bool
    time: float


def _file(run_path: Path, part: str) -> Path:
    return run_path / "links" / f"{part}.handover.json"


def leave(run_path: Path, part: str, by: str, reason: str, carries_on: bool) -> Handover:
    """Write the record, unless another node has; return the one that stands. Raises OSError."""
    record = Handover(part, by, reason, carries_on, time.time())
    created = create_exclusive(_file(run_path, part), json.dumps({"v": 1, **to_builtins(record)}).encode(), 0o644)
    return record if created else read(run_path, part) or record


def read(run_path: Path, part: str) -> Handover | None:
    """Return the record of a part; None without a readable one. Raises Untrusted."""
    f = Fields.of(trusted_files.read_object(_file(run_path, part)))
    at = f.time("time")
    if at is None or not f.has("part"):
        return None
    return Handover(f.text("part"), f.text("by"), f.text("reason"), f.data.get("carries_on") is True, at)
