"""The output of ``resilio status --json`` and ``resilio ledger --json``. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from resilio_hpc.core.ledger import Event
from resilio_hpc.report.overview import Overview

VERSION = 1


def overview_json(o: Overview) -> str:
    """Return one object; unknown values are null."""
    status: dict[str, Any] | None = None
    if o.status is not None:
        status = asdict(o.status) | {"step": o.status.step, "steps_per_s": o.status.steps_per_s}
    data = {
        "v": VERSION,
        "run_dir": str(o.path),
        "run_id": o.run_id,
        "created": o.created,
        "time": o.now,
        "state": o.state,
        "silent_s": o.silent_s,
        "job": o.job,
        "jobs": o.jobs,
        "verdict": o.verdict.fields if o.verdict is not None else None,
        "checkpoint": asdict(o.checkpoint) if o.checkpoint is not None else None,
        "restore": asdict(o.restore) if o.restore is not None else None,
        "status": status,
        "faults": [asdict(fault) for fault in o.faults],
        "out_of_use": [asdict(device) for device in o.out_of_use],
        "progress": {
            "total": o.progress.total,
            "left_s": o.progress.left_s,
            "job_left_s": o.progress.job_left_s,
            "next_job": o.progress.next_job or None,
            "logged": asdict(o.progress.points[-1]) if o.progress.points else None,
        },
        "goodput": asdict(o.goodput) | {"share": o.goodput.share},
    }
    return json.dumps(data, indent=1, default=str)


def event_json(event: Event) -> str:
    """Return the ledger's line again."""
    rest = {name: value for name, value in event.fields.items() if name != "v"}
    line = {"v": event.fields.get("v"), "time": event.time, "writer": event.writer, "event": event.kind, **rest}
    return json.dumps(line, separators=(",", ":"))
