"""Goodput: the share of a run's time in which training moved forward (OPS-6). Pure.

    goodput = useful time / total time

**Total** time is the time that the run's jobs ran, from each job's launch to its end; time in Slurm's queue between the
jobs of a chain is told apart (``queued_s``). **Useful** is the time of each round from the moment when all its ranks
had done their first step until its end or its first failure, minus the part whose steps had to be done again because
ranks were restored from an earlier step, and minus the time in which the controller saw no steps for too long
(``stalled``), from the last step on, and the time in which ranks paused for a test of the nodes. What is left over is
start-up, recovery and closing; the parts add up to the total. Time that training itself spends on saving counts as
useful: it is the price of a step.

Where a script reports no steps, a round counts from the start of its ranks, and steps done again cannot be told
(``steps_known`` is False): the share is then an upper bound.

The numbers are sums of the spans of ``accounting``, as are those of ``resilio report``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from resilio_hpc.core.ledger import Event
from resilio_hpc.report.accounting.causes import US, PartPhase, TimeCause
from resilio_hpc.report.accounting.run_time import RunTime, run_time


@dataclass(frozen=True)
class Goodput:
    """Goodput of a run. All times in seconds.

    ``useful_s + redone_s + stalled_s + startup_s + recovery_s + closing_s + unknown_s == total_s``.
    """

    total_s: float
    useful_s: float
    redone_s: float
    startup_s: float
    recovery_s: float
    closing_s: float
    queued_s: float
    jobs: int
    rounds: int
    steps_known: bool
    stalled_s: float = 0.0
    unknown_s: float = 0.0

    @property
    def share(self) -> float | None:
        """Return useful time / total time, 0 to 1; None when no time has passed."""
        return self.useful_s / self.total_s if self.total_s > 0 else None


def goodput(events: Iterable[Event], now: float | None = None) -> Goodput:
    """Return the goodput of a run so far.

    ``events`` by time; ``now``: until when a job that has not ended is known to run.
    """
    return goodput_of(run_time(list(events), now))


def goodput_of(time: RunTime) -> Goodput:
    """Return the goodput of a run whose time is accounted for."""
    by_cause = dict.fromkeys(TimeCause, 0)
    by_phase = dict.fromkeys(PartPhase, 0)
    for part in time.parts:
        for span in part.spans:
            if span.phase is PartPhase.TRAINING or span.cause is TimeCause.UNKNOWN:
                by_cause[span.cause] += span.us
            else:
                by_phase[span.phase] += span.us
    parts = [part.facts for part in time.parts]
    queued = sum(max(0, later.began.us - earlier.ended.us) for earlier, later in pairwise(parts))
    return Goodput(
        total_s=time.jobs_us / US,
        useful_s=(by_cause[TimeCause.TRAIN] + by_cause[TimeCause.SAVE]) / US,
        redone_s=by_cause[TimeCause.REPEATED] / US,
        startup_s=by_phase[PartPhase.STARTUP] / US,
        recovery_s=by_phase[PartPhase.BETWEEN] / US,
        closing_s=by_phase[PartPhase.CLOSING] / US,
        queued_s=queued / US,
        jobs=len(parts),
        rounds=sum(len(part.rounds) for part in parts),
        steps_known=time.steps_known,
        stalled_s=by_cause[TimeCause.STALLED] / US,
        unknown_s=by_cause[TimeCause.UNKNOWN] / US,
    )
