"""The table of ``faults.py``: one row for each drill."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from resilio_hpc.drills.kind import HEARTBEAT_S, Drill

Record = dict[str, Any]
COLUMNS = (
    *("fault", "passed", "one round at a time", "recovery, median", "worst"),
    *("after the heartbeat limit, median", "worst", "steps done again, worst"),
)


def table(drills: Sequence[Drill], records: Sequence[Record], title: str) -> Table:
    """One row for each of the drills that has a result."""
    commits = sorted({str(record.get("commit", "")) for record in records} - {""})
    made = Table(title=f"{title}, heartbeat limit {HEARTBEAT_S:g} s", caption=f"commits {', '.join(commits)}")
    for column in COLUMNS:
        made.add_column(column, justify="left" if column == "fault" else "right")
    for drill in drills:
        runs = [record for record in records if record["name"] == drill.full_name]
        if runs:
            made.add_row(drill.full_name, *_cells(drill, runs))
    passed = sum(record["passed"] for record in records)
    alone = sum(not record.get("two_at_once", "") for record in records)
    made.add_section()
    made.add_row("all", f"{passed}/{len(records)}", f"{alone}/{len(records)}")
    return made


def _cells(drill: Drill, runs: Sequence[Record]) -> list[str]:
    recovery = [record["recovery_s"] for record in runs if record["recovery_s"] is not None]
    after_limit = [seconds - HEARTBEAT_S for seconds in recovery] if drill.node_level else []
    lost = [record["lost_steps"] for record in runs if record["lost_steps"] is not None]
    return [
        f"{sum(record['passed'] for record in runs)}/{len(runs)}",
        f"{sum(not record.get('two_at_once', '') for record in runs)}/{len(runs)}",
        *_median_and_worst(recovery),
        *_median_and_worst(after_limit),
        str(max(lost)) if lost else "",
    ]


def _median_and_worst(seconds: Sequence[float]) -> tuple[str, str]:
    return (f"{statistics.median(seconds):.2f} s", f"{max(seconds):.2f} s") if seconds else ("", "")
