"""All alerts of a run. Pure."""

from __future__ import annotations

from resilio_hpc.alerts import of_chain, of_checkpoints, of_progress, of_recovery
from resilio_hpc.alerts.alert import Alert, Limits, Severity
from resilio_hpc.alerts.run_facts import AlertFacts

WITHOUT_PARAMETERS = (
    of_chain.run_failed, of_chain.chain_exhausted, of_progress.no_news, of_progress.stalled,
    of_recovery.restart_storm, of_recovery.budget_low, of_recovery.suspect, of_recovery.spares_spent,
    of_recovery.time_limit_as_failure, of_progress.not_alive, of_checkpoints.slow_save, of_checkpoints.slow_load,
)  # fmt: skip


def judge(facts: AlertFacts, limits: Limits, window_s: float = 0.0) -> list[Alert]:
    """Return the alerts that fire, critical ones first. ``window_s``: of goodput; 0: over the whole run."""
    found = [alert for detector in WITHOUT_PARAMETERS for alert in detector(facts, limits)]
    found += of_progress.low_goodput(facts, limits, window_s)
    return sorted(found, key=lambda alert: alert.severity is not Severity.CRITICAL)
