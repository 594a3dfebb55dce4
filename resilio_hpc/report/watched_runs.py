"""The summaries of many runs, again and again, at little cost.

Of a run that has ended, only the times of three names are looked at. Of the others the small files are read each time,
and of the ledger what is new. Goodput grows slowly, so its sum is made again only every ten seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from resilio_hpc.core.ledger import Event, LedgerReader
from resilio_hpc.report.accounting import part_facts
from resilio_hpc.report.goodput import Goodput, goodput
from resilio_hpc.report.present import facts_of
from resilio_hpc.report.status import Status
from resilio_hpc.report.summary import LedgerSummary, RunSummary, kept_summary, summarise

GOODPUT_EVERY_S = 10.0
_NAMES = ("status.json", "verdict.json", "ledger")

Marks = tuple[int, ...]


@dataclass
class _Watched:
    """What is kept of a run. ``reader``: None until its ledger had to be read."""

    reader: LedgerReader | None = None
    events: list[Event] = field(default_factory=list)
    goodput: Goodput | None = None
    summed: float = 0.0
    marks: Marks = ()
    ended: RunSummary | None = None


class WatchedRuns:
    """Reads runs; ``read`` is for ``run_list.summaries``, which calls it in several threads, once at a time per run."""

    def __init__(self) -> None:
        self._runs: dict[Path, _Watched] = {}

    def forget(self, others_than: set[Path]) -> None:
        """Keep nothing of runs that are not looked at any more."""
        for path in [path for path in self._runs if path not in others_than]:
            del self._runs[path]

    def read(self, path: Path, now: float) -> RunSummary:
        """Return the run's summary. Raises UsageError, Untrusted."""
        kept = self._runs.setdefault(path, _Watched())
        marks = _marks(path)  # before the reading: what changes meanwhile is read the next time
        if kept.ended is not None and marks == kept.marks:
            return kept.ended
        summary = summarise(path, now, lambda run, status: _ledger(kept, run, status, now))
        if summary.state == "ended":  # what was read of its ledger is not needed any more
            self._runs[path] = _Watched(marks=marks, ended=summary)
        return summary


def _marks(path: Path) -> Marks:
    found = []
    for name in _NAMES:
        try:
            found.append((path / name).stat().st_mtime_ns)
        except OSError:
            found.append(0)
    return tuple(found)


def _ledger(kept: _Watched, run: Path, status: Status | None, now: float) -> LedgerSummary:
    if kept.reader is None:
        summary = kept_summary(run)
        if summary is not None:
            return summary
        kept.reader = LedgerReader(run / "ledger", part_facts.KINDS | {part_facts.OF_STARTS})
    new = kept.reader.read_new()
    if new:
        kept.events = sorted([*kept.events, *new], key=lambda event: event.time)
    if kept.goodput is None or now - kept.summed >= GOODPUT_EVERY_S or now < kept.summed:
        kept.goodput, kept.summed = goodput(kept.events, status.time if status else None), now
    return LedgerSummary({}, facts_of(kept.events), kept.goodput)
