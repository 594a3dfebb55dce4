"""A campaign's file of results: JSON lines, one for each fault and one for each part, each written at once.

The same file goes on where it ended: each start of the command is a part, which draws other faults, and does what is
left of the time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from resilio_hpc.core.errors import UsageError
from resilio_hpc.drills.campaign_plan import CampaignPlan
from resilio_hpc.drills.campaign_result import CampaignResult, StruckFault, as_fields

SAME = ("mtbf_s", "seed", "weights", "nodes", "ranks", "step_s", "every", "torch")
"""Of the plan: what all parts of one file have in common."""


class CampaignFile:
    """The results so far, and those of the part that begins now. Without a path, nothing is kept."""

    def __init__(self, path: Path | None, plan: CampaignPlan) -> None:
        """Read what is there. Raises UsageError where it is of another plan, or is no such file."""
        self._path = path
        self._plan = plan
        self.rows = _rows(path)
        self.part = len({row["part"] for row in self.rows})
        for row in self.rows:
            if row["kind"] == "begins" and any(row["plan"].get(key) != _plain(plan)[key] for key in SAME):
                raise UsageError(f"{path} is of another campaign: {row['plan']}; name another file")

    @property
    def left_s(self) -> float:
        """Return how many seconds of the plan's time are left."""
        done_s: float = sum(row["seconds"] for row in self.rows if row["kind"] == "part")
        return max(0.0, self._plan.duration_s - done_s)

    def begin(self) -> None:
        """Write down that a part begins. Raises OSError."""
        self._add({"kind": "begins", "plan": _plain(self._plan)})

    def struck(self, fault: StruckFault) -> None:
        """Write down a fault, as it strikes."""
        self._add({"kind": "fault", **asdict(fault)})

    def ended(self, result: CampaignResult) -> None:
        """Write down what the part came to."""
        self._add({"kind": "part", **as_fields(result)})

    def _add(self, fields: Mapping[str, Any]) -> None:
        row = {"v": 1, "part": self.part, **fields}
        self.rows.append(row)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def parts(self) -> list[dict[str, Any]]:
        """Return what all parts came to."""
        return [row for row in self.rows if row["kind"] == "part"]


def _plain(plan: CampaignPlan) -> dict[str, Any]:
    return {key: dict(value) if isinstance(value, Mapping) else value for key, value in asdict(plan).items()}


def _rows(path: Path | None) -> list[dict[str, Any]]:
    if path is None or not path.exists():
        return []
    found = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # killed in the middle of this line
        if not isinstance(row, dict) or not {"part", "kind"} <= set(row):
            raise UsageError(f"{path} is no file of a campaign's results")
        found.append(row)
    return found


def summary(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return all parts together: shares are weighted by time. Pure."""
    wall = sum(part["stamped"]["wall_s"] for part in parts)
    faults = [fault for part in parts for fault in part["faults"]]

    def mean(key: str) -> float | None:
        known = [(part[key], part["stamped"]["wall_s"]) for part in parts if part[key] is not None]
        whole = sum(weight for _, weight in known)
        return sum(value * weight for value, weight in known) / whole if whole else None

    lost_s = sum(part["lost_s"] for part in parts)
    return {
        "parts": len(parts),
        "seconds": sum(part["seconds"] for part in parts),
        "wall_s": wall,
        "faults": len(faults),
        "hurt": sum(fault["hurts"] for fault in faults),
        "goodput": mean("goodput"),
        "ledger_goodput": mean("ledger_goodput"),
        "twin_goodput": mean("twin_goodput"),
        "relative": mean("relative"),
        "lost_per_fault_s": lost_s / len(faults) if faults else None,
        "repeated_steps": sum(part["stamped"]["repeated_steps"] for part in parts),
        "steps": sum(part["stamped"]["steps"] for part in parts),
        "compared": sum(part["compared"] for part in parts),
        "wrong": [part["wrong"] for part in parts if part["wrong"]],
        "by_fault": by_fault(faults),
    }


def by_fault(faults: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return for each kind of fault how often it struck, and what it cost. Pure."""
    found: dict[str, dict[str, Any]] = {}
    for name in sorted({fault["name"] for fault in faults}):
        some = [fault for fault in faults if fault["name"] == name]
        recovery = sorted(fault["recovery_s"] for fault in some if fault["recovery_s"] is not None)
        again = [fault["repeated_steps"] for fault in some if fault["repeated_steps"] is not None]
        found[name] = {
            "faults": len(some),
            "recovery_median_s": recovery[len(recovery) // 2] if recovery else None,
            "recovery_max_s": recovery[-1] if recovery else None,
            "repeated_steps_max": max(again, default=None),
        }
    return found
