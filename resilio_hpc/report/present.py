"""A run's present state, from the facts of its ledger, its status and its verdict. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from resilio_hpc.core.json_fields import Fields, printable
from resilio_hpc.core.ledger import Event
from resilio_hpc.report.status import Status

STALE_S = 15.0


@dataclass(frozen=True)
class RunVerdict:
    """How the run's newest job ended."""

    verdict: str
    reason: str
    exit_code: int | None
    time: float
    job: str
    fields: dict[str, Any]


def parse_verdict(data: object) -> RunVerdict | None:
    """Return the verdict in a JSON object, or None."""
    f = Fields.of(data)
    name = f.text("verdict")
    if not name:
        return None
    return RunVerdict(
        printable(name, 40), printable(f.text("reason"), 300), f.whole("exit_code"), f.time("time") or 0.0,
        f.text("job"), dict(f.data),
    )  # fmt: skip


@dataclass(frozen=True)
class LedgerFacts:
    """Facts of a whole ledger.

    ``jobs``: in order; ``launched``: when the newest began, ``last``: the newest event (Unix seconds); ``committed``:
    the step of the newest commit.
    """

    jobs: tuple[str, ...] = ()
    launched: float | None = None
    last: float = 0.0
    committed: int | None = None


def facts_of(events: Sequence[Event]) -> LedgerFacts:
    """Return the facts. ``events`` by time."""
    launches = [event for event in events if event.kind == "launch"]
    steps = (Fields(event.fields).whole("step") for event in reversed(events) if event.kind == "committed")
    return LedgerFacts(
        tuple(dict.fromkeys(Fields(event.fields).text("job") for event in launches)),
        launches[-1].time if launches else None,
        events[-1].time if events else 0.0,
        next((step for step in steps if step is not None), None),
    )


@dataclass(frozen=True)
class RunNow:
    """The run now.

    ``state``: starting, running, stale (no news for long) or ended; ``verdict`` only when ended; ``status`` only of
    the newest job.
    """

    state: str
    silent_s: float | None
    job: str
    jobs: int
    status: Status | None
    verdict: RunVerdict | None


def present(
    facts: LedgerFacts,
    created: float | None,
    status: Status | None,
    verdict: RunVerdict | None,
    now: float,
    since: float = 0.0,
) -> RunNow:
    """Return the run at ``now``; ``since``: news before that are of an earlier job (Unix seconds)."""
    job = facts.jobs[-1] if facts.jobs else (verdict.job if verdict else "")
    launched = facts.launched
    if verdict is not None and launched is not None and verdict.job != job and verdict.time < launched:
        verdict = None  # of an earlier job: the next one runs
    if status is not None and launched is not None and status.time < launched - 1.0:
        status = None
    last = max(status.time if status else 0.0, facts.last, created or 0.0, since)
    silent = max(0.0, now - last) if last else None
    if verdict is not None:
        state = "ended"
    elif silent is not None and silent > STALE_S:
        state = "stale"
    else:
        state = "running" if status is not None and status.phase == "running" else "starting"
    return RunNow(state, silent, printable(job, 60), max(len(facts.jobs), 1), status, verdict)
