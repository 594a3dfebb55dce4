"""Alerts on checkpoints: saves and loads, watched apart (OPS-6). Pure."""

from __future__ import annotations

from collections.abc import Iterator

from resilio_hpc.alerts.alert import Alert, Limits, fire
from resilio_hpc.alerts.run_facts import AlertFacts
from resilio_hpc.core.json_fields import Fields
from resilio_hpc.core.ledger import Event
from resilio_hpc.events.phrases import seconds

RECENT_S = 24 * 3600.0  # a load from before is no news


def newest_save(facts: AlertFacts) -> tuple[Event, float] | None:
    """Return the newest save and its seconds; one that is overdue counts with the time that it has taken so far.

    From when training waited for its snapshot until it was durable. Ledgers without ``save_s`` give a lower bound.
    """
    if (overdue := _overdue(facts)) is not None:
        return overdue, facts.until - overdue.time + max(0.0, Fields(overdue.fields).number("waited_s") or 0.0)
    for event in reversed(facts.events):
        f = Fields(event.fields)
        if event.kind == "committed":
            waited, took = f.number("blocked_s") or 0.0, f.number("save_s")
            took_s = took if took is not None else f.number("seconds") or 0.0
            return event, max(0.0, waited) + max(0.0, took_s)
    return None


def _overdue(facts: AlertFacts) -> Event | None:
    """Return the report of a save that is still on its way."""
    for event in reversed(facts.events):
        if event.kind in ("save_resumed", "committed", "round", "verdict"):
            return None
        if event.kind == "save_overdue":
            return event
    return None


def slow_save(facts: AlertFacts, limits: Limits) -> Iterator[Alert]:
    """Yield the alert where the newest save was, or already is, too slow."""
    found = newest_save(facts)
    if found is None or not facts.active or found[1] <= limits["slow_save"]:
        return
    event, took_s = found
    step = Fields(event.fields).whole("step")
    ended = event.kind == "committed"
    since = event.time - took_s if ended else facts.until - took_s
    verb = "took" if ended else "has taken"
    text = f"the checkpoint of step {step} {verb} {seconds(took_s)}, longer than {seconds(limits['slow_save'])}"
    yield fire("slow_save", since, text, limits, round(took_s, 1), [event])


def newest_load(facts: AlertFacts) -> tuple[Event, float] | None:
    """Return the newest restore and the seconds of its slowest rank."""
    for event in reversed(facts.events):
        f = Fields(event.fields)
        took = f.number("restore_s")
        if event.kind == "first_step" and (f.whole("restored") or 0) >= 0 and took is not None and took >= 0:
            return event, took
    return None


def slow_load(facts: AlertFacts, limits: Limits) -> Iterator[Alert]:
    """Yield the alert where the newest restore of the last day was too slow."""
    found = newest_load(facts)
    if found is None or not facts.active or found[1] <= limits["slow_load"]:
        return
    event, took_s = found
    if facts.now - event.time > RECENT_S:
        return
    f = Fields(event.fields)
    source = f.text("source") or "?"
    text = f"ranks read step {f.whole('restored')} from {source} in {seconds(took_s)}"
    yield fire("slow_load", event.time - took_s, text, limits, round(took_s, 1), [event])
