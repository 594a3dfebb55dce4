"""A run in one line: its state, step and goodput.

Goodput needs the whole ledger, which may be long. So a launch that ends keeps what it says in ``summary.json``. That
holds as long as the ledger's files have the sizes that are noted there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from resilio_hpc.core import trusted_files
from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.errors import Untrusted
from resilio_hpc.core.ledger import read_ledger
from resilio_hpc.report.goodput import Goodput, goodput
from resilio_hpc.report.overview import find_run, read_identity
from resilio_hpc.report.present import LedgerFacts, facts_of, parse_verdict, present
from resilio_hpc.report.status import Status, parse_status

FILE = "summary.json"
VERSION = 1


@dataclass(frozen=True)
class RunSummary:
    """A run at one moment. ``created``: Unix seconds; ``goodput``: 0 to 1; None, "": not known.

    ``state``: starting, running, stale or ended; ``verdict`` and ``exit_code`` only when ended.
    ``steps_known`` False: goodput is an upper bound.
    """

    path: Path
    run_id: str
    created: float | None
    job: str
    jobs: int
    state: str
    verdict: str
    exit_code: int | None
    step: int | None
    goodput: float | None
    steps_known: bool


class LedgerSummary(msgspec.Struct, frozen=True):
    """What a ledger says in sum. ``sizes``: bytes of the ledger's files, by name."""

    sizes: dict[str, int]
    facts: LedgerFacts
    goodput: Goodput
    v: int = VERSION


def summarise(
    path: Path, now: float, of_ledger: Callable[[Path, Status | None], LedgerSummary] | None = None
) -> RunSummary:
    """Return the run's summary. Raises UsageError where ``path`` is no run directory, or not this user's alone.

    ``of_ledger``: reads the ledger of that directory, whose controller told of that status.
    """
    given, path = path, find_run(path)
    run_id, created = read_identity(path)
    status = parse_status(trusted_files.read_object(path / "status.json"))
    verdict = parse_verdict(trusted_files.read_object(path / "verdict.json"))
    ledger = of_ledger(path, status) if of_ledger is not None else kept_summary(path) or _read(path, status)
    found = present(ledger.facts, created, status, verdict, now)
    committed = (
        ledger.facts.committed,
        found.status.step if found.status else None,
        found.status.committed if found.status else None,
    )
    return RunSummary(
        given, run_id, created, found.job, found.jobs, found.state,
        found.verdict.verdict if found.verdict else "", found.verdict.exit_code if found.verdict else None,
        max((step for step in committed if step is not None), default=None),
        ledger.goodput.share, ledger.goodput.steps_known,
    )  # fmt: skip


def keep(path: Path) -> None:
    """Write ``summary.json``, for a run whose launch has ended. Raises OSError, Untrusted."""
    write_atomic(path / FILE, msgspec.json.encode(_read(path, None)), durable=False)


def _read(path: Path, status: Status | None) -> LedgerSummary:
    sizes = _sizes(path)  # before the reading: where the ledger grows meanwhile, the summary does not hold
    events = read_ledger(path / "ledger")
    return LedgerSummary(sizes, facts_of(events), goodput(events, status.time if status else None))


def kept_summary(path: Path) -> LedgerSummary | None:
    """Return the kept summary, if it is that of the ledger as it is now."""
    try:
        kept = msgspec.json.decode(trusted_files.read(path / FILE), type=LedgerSummary)
    except (OSError, Untrusted, msgspec.MsgspecError):
        return None
    return kept if kept.v == VERSION and kept.sizes == _sizes(path) else None


def _sizes(path: Path) -> dict[str, int]:
    try:
        with os.scandir(path / "ledger") as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.name.endswith(".jsonl")}
    except OSError:
        return {}
