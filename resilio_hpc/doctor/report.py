"""The report: for people, at any width, and as JSON. Pure."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from resilio_hpc.doctor.examine import DoctorResult
from resilio_hpc.doctor.finding import DoctorFinding, DoctorState

VERSION = 1
_FINE = (DoctorState.OK, DoctorState.NOT_HERE)
_STATE_WIDTH = max(len(state.value) for state in DoctorState)
_LEAST_TEXT = 24


def exit_code(results: Sequence[DoctorResult]) -> int:
    """Return 1 where a launch, or its checkpoints, would fail; else 0."""
    return int(bool(_named(results, DoctorState.FAILED)))


def sentence(results: Sequence[DoctorResult], all_looked_at: bool) -> str:
    """Return the verdict in one sentence. ``all_looked_at``: all checks, the recovery too."""
    failing, doubtful = (_named(results, state) for state in (DoctorState.FAILED, DoctorState.WARNING))
    notes = f"; warnings: {', '.join(doubtful)}" if doubtful else ""
    if failing:
        return (
            f"Launches, or their checkpoints, fail on this machine until this is mended: {', '.join(failing)}{notes}."
        )
    if not all_looked_at:
        return f"Nothing that was looked at keeps launches from working on this machine{notes}."
    return f"Launches work on this machine{notes}."


def as_text(results: Sequence[DoctorResult], verdict: str, width: int) -> str:
    """Return the report: a line for each part that is fine, for others also what it means and what to do."""
    name_width = max(len(result.check.name) for result in results)
    lines: list[str] = []
    for group, members in groupby(results, lambda result: result.check.group):
        lines += ["", group] if lines else [group]
        for result in members:
            for one in result.findings:
                lines += _lines(result.check.name, one, name_width, width)
    return "\n".join([*lines, "", *_wrapped(verdict, "", "", width)])


def _lines(name: str, one: DoctorFinding, name_width: int, width: int) -> list[str]:
    head = f"  {one.state.value:<{_STATE_WIDTH}}  {name:<{name_width}}  "
    if one.state in _FINE:
        return [_cut(head + one.seen, width)]
    indent = " " * (_STATE_WIDTH + 4)
    wide = width - len(head) >= _LEAST_TEXT + len(one.seen) // 2
    first = _wrapped(one.seen, head if wide else indent, " " * len(head) if wide else indent, width)
    more = [*_wrapped(one.means, indent, indent, width), *_wrapped(f"to do: {one.todo}", indent, indent + "  ", width)]
    return [*([] if wide else [head.rstrip()]), *first, *more]


def _wrapped(text: str, first: str, rest: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"


def as_json(results: Sequence[DoctorResult], verdict: str, host: str, run_dir: str) -> str:
    """Return the whole result as one object."""
    found: dict[str, Any] = {
        "v": VERSION,
        "host": host,
        "run_dir": run_dir,
        "works": not exit_code(results),
        "verdict": verdict,
        "counts": _counts(results),
        "checks": [
            {
                "name": result.check.name, "group": result.check.group, "state": one.state.value, "about": one.about,
                "seen": one.seen, "means": one.means, "todo": one.todo, "seconds": round(result.seconds, 3),
            }
            for result in results
            for one in result.findings
        ],
    }  # fmt: skip
    return json.dumps(found, indent=1)


def _counts(results: Sequence[DoctorResult]) -> dict[str, int]:
    counted = Counter(one.state.value for result in results for one in result.findings)
    return {state.value: counted[state.value] for state in DoctorState}


def _named(results: Sequence[DoctorResult], state: DoctorState) -> list[str]:
    return [result.check.name for result in results if any(one.state is state for one in result.findings)]
