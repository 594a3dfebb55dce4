"""A check's numbers as metrics, for many runs in one file: part ``check`` of ``metrics/schema``."""

from __future__ import annotations

from collections.abc import Sequence

from resilio_hpc.alerts.alert import Alert, rules
from resilio_hpc.alerts.of_chain import jobs_left
from resilio_hpc.alerts.of_checkpoints import newest_load, newest_save
from resilio_hpc.alerts.of_progress import alive_share, goodput_share, progressed_at
from resilio_hpc.alerts.of_recovery import recent_failures, restarts_left
from resilio_hpc.alerts.run_facts import AlertFacts
from resilio_hpc.metrics.sheet import Sheet


def sheet(facts: AlertFacts, alerts: Sequence[Alert], window_s: float = 0.0) -> Sheet:
    """Return the values of one run. Pure. What is not known is left out."""
    found = Sheet()
    save, load, at = newest_save(facts), newest_load(facts), progressed_at(facts)
    found.put("check_timestamp_seconds", facts.now)
    found.put("check_active", int(facts.active))
    found.put("check_goodput_ratio", goodput_share(facts, window_s))
    found.put("check_alive_ratio", alive_share(facts)[0])
    found.put("check_save_seconds", save[1] if save else None)
    found.put("check_load_seconds", load[1] if load else None)
    found.put("check_progress_age_seconds", max(0.0, facts.until - at) if at is not None and facts.runs else None)
    found.put("check_failures", len(recent_failures(facts)))
    found.put("check_restarts_left", restarts_left(facts))
    found.put("check_jobs_left", jobs_left(facts))
    severities = {alert.name: alert.severity for alert in reversed(alerts)}
    for name, rule in rules().items():
        severity = severities.get(name, rule.severity)
        found.put("check_alert", int(name in severities), name, severity.value)
    return found
