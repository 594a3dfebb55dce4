"""Alerts on the chain of jobs: none is left, or the run is over without being complete. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from resilio_hpc.alerts.alert import Alert, Limits, Severity, fire
from resilio_hpc.alerts.run_facts import AlertFacts
from resilio_hpc.events.phrases import plural
from resilio_hpc.report.accounting.causes import US

UNFINISHED = ("time_limit", "needs_new_job", "terminated")
"""Verdicts with which a next job goes on."""
FAILED = ("failed", "no_progress", "not_enough_nodes", "agents_lost")


def jobs_left(facts: AlertFacts) -> int | None:
    """Return how many jobs the chain may still have, one that waits included; None without a limit or a chain."""
    if not facts.chain.chained or facts.chain.jobs is None:
        return None
    return max(0, facts.chain.jobs - facts.link)


def chain_exhausted(facts: AlertFacts, limits: Limits) -> Iterator[Alert]:
    """Yield the alert where the last job of a chain runs, or has ended, and the run is not complete.

    A chain that its user has stopped has no such alert.
    """
    part, verdict = facts.part, facts.state.verdict
    if (
        part is None
        or facts.chain.stopped
        or facts.next_job
        or facts.of_kind("chain_stopped", since=part.began.us / US)
    ):
        return
    if facts.state.state == "ended":
        was_stopped = verdict is not None and verdict.verdict == "terminated" and not facts.chain.chained
        if verdict is None or verdict.verdict not in UNFINISHED or was_stopped:  # by its user, with scancel
            return
        text = (
            f"job {verdict.job or '?'} has ended ({verdict.verdict.replace('_', ' ')}), and no job carries the run on"
        )
        lines = facts.of_kind("verdict", "successor_refused", "launch_ends")
        yield fire("chain_exhausted", verdict.time or facts.until, text, limits, 0.0, lines)
        return
    left = jobs_left(facts)
    if left is not None and left < limits["chain_exhausted"]:
        text = (
            f"job {facts.state.job or '?'} is the last one of {plural(facts.chain.jobs, 'job')} that the chain may have"
        )
        lines = facts.of_kind("launch")
        yield fire("chain_exhausted", part.began.us / US, text, limits, float(left), lines[-1:], Severity.WARNING)
        return
    refused = facts.of_kind("successor_refused", since=part.began.us / US)
    if refused and not facts.of_kind("successor", since=refused[-1].time):
        limit = str(refused[-1].fields.get("limit", "?"))[:100]
        text = f"the site allows no next job yet ({limit}); it is tried again while this one runs"
        yield fire("chain_exhausted", refused[0].time, text, limits, left, refused, Severity.WARNING)


def run_failed(facts: AlertFacts, limits: Limits) -> Iterator[Alert]:
    """Yield the alert where the run is over and has failed."""
    verdict = facts.state.verdict
    if facts.state.state != "ended" or verdict is None or verdict.verdict not in FAILED or facts.next_job:
        return
    reason = f": {verdict.reason}" if verdict.reason else ""
    text = f"the run has ended ({verdict.verdict.replace('_', ' ')}){reason}"
    lines = facts.of_kind("rank_failed", "node_lost", "verdict")
    yield fire("run_failed", verdict.time or facts.until, text, limits, None, lines)
