"""The output of ``resilio check``: lines for people, and JSON. Pure, except for the time zone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from resilio_hpc.alerts.actions import ACTS
from resilio_hpc.alerts.alert import Alert
from resilio_hpc.alerts.check import RunCheck
from resilio_hpc.alerts.delivery import do_text
from resilio_hpc.core.json_fields import printable
from resilio_hpc.core.terminal import local_time
from resilio_hpc.events.phrases import plural, seconds

VERSION = 1
LONGEST = 600


def check_lines(check: RunCheck) -> list[str]:
    """Return all alerts that fire."""
    facts = check.facts
    count = plural(len(check.alerts), "alert") if check.alerts else "no alert"
    state = facts.state.verdict.verdict if facts.state.verdict is not None else facts.state.state
    lines = [f"{printable(str(facts.path), 200)} ({printable(state, 40).replace('_', ' ')}): {count}"]
    for alert in check.alerts:
        lines += _alert_lines(alert, check)
    return lines


def change_lines(check: RunCheck) -> list[str]:
    """Return what has fired or cleared since the check before; nothing where all is as it was."""
    name, lines = printable(check.facts.path.name, 100), []
    for alert in check.new.fired:
        first, *rest = _alert_lines(alert, check)
        lines += [f"{name}: {first}", *rest]
    for one in check.new.cleared:
        about = f" of {one.about}" if one.about else ""
        lasted = seconds(max(0.0, check.facts.now - one.since))
        lines.append(printable(f"{name}: CLEAR {one.name}{about} after {lasted}; it was: {one.text}", LONGEST))
    return lines


def _alert_lines(alert: Alert, check: RunCheck) -> Iterator[str]:
    ago = seconds(max(0.0, check.facts.now - alert.since))
    since = f"since {local_time(alert.since, '%m-%d %H:%M:%S')} ({ago})"
    yield printable(f"{alert.severity.upper()} {alert.name} {since}: {alert.text}", LONGEST)
    if alert.places:
        yield printable(f"  ledger: {', '.join(alert.places)}", LONGEST)
    for line in check.found.get(alert.key, ()):
        yield printable(f"  {ACTS[alert.name]}: {line}", LONGEST)
    yield printable(f"  do: {do_text(alert, check.facts)}", LONGEST)


def checks_json(checks: Sequence[RunCheck], unread: Sequence[tuple[str, str]], now: float) -> str:
    """Return one object for all runs. ``unread``: (path, why) of those that could not be checked."""
    runs = [_run_fields(check) for check in checks]
    problems = [{"run_dir": path, "problem": why} for path, why in unread]
    return json.dumps({"v": VERSION, "time": now, "runs": runs, "unread": problems}, indent=1)


def _run_fields(check: RunCheck) -> dict[str, Any]:
    facts = check.facts
    return {
        "run_dir": str(facts.path), "run_id": facts.run_id, "state": facts.state.state, "job": facts.state.job,
        "active": facts.active, "alerts": [_alert_fields(alert, check) for alert in check.alerts],
        "fired": [alert.key for alert in check.new.fired],
        "cleared": [
            {"name": one.name, "node": one.about, "since": one.since, "text": one.text} for one in check.new.cleared
        ],
        "errors": list(check.errors),
    }  # fmt: skip


def _alert_fields(alert: Alert, check: RunCheck) -> dict[str, Any]:
    return {
        "name": alert.name, "severity": alert.severity.value, "since": alert.since, "value": alert.value,
        "limit": alert.limit, "unit": alert.unit, "node": alert.about, "text": alert.text,
        "do": do_text(alert, check.facts), "lines": list(alert.places),
        "found": list(check.found.get(alert.key, ())),
    }  # fmt: skip
