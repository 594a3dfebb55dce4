"""One check of one run: read, judge, look further, keep what was reported, and report what is new."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from resilio_hpc.alerts import actions, delivery, memory
from resilio_hpc.alerts.alert import Alert, Limits, default_limits
from resilio_hpc.alerts.judge import judge
from resilio_hpc.alerts.memory import AlertChanges, AlertMemory, MemoryFile
from resilio_hpc.alerts.run_facts import AlertFacts, StepSeen, read_facts
from resilio_hpc.core import bounded
from resilio_hpc.launch.rundir.notify_targets import Target
from resilio_hpc.report.overview import find_run, read_identity

READ_S = 60.0  # for the files of one run


@dataclass(frozen=True)
class CheckOptions:
    """What a check is to do. ``state``: the file of what was reported; None: the run's own.

    ``keeps``: what is reported is kept, so that only changes are reported. ``window_s``: of goodput; 0: the whole run.
    ``action_s``: for each further look; 0: none is taken.
    """

    limits: Limits = field(default_factory=default_limits)
    window_s: float = 0.0
    action_s: float = actions.DEADLINE_S
    keeps: bool = False
    state: Path | None = None
    targets: tuple[Target, ...] = ()


@dataclass(frozen=True)
class RunCheck:
    """The result. ``found``: what further looks have found, by ``Alert.key``; ``errors``: what could not be done."""

    facts: AlertFacts
    alerts: tuple[Alert, ...]
    new: AlertChanges
    found: dict[str, tuple[str, ...]]
    errors: tuple[str, ...] = ()


def check_run(path: Path, options: CheckOptions, now: float) -> RunCheck:
    """Check a run. Raises UsageError where it is none, ResilioError, TimeoutError."""
    if not options.keeps:
        facts, alerts = _judged(path, options, now, None)
        return RunCheck(facts, alerts, AlertChanges(alerts, ()), _looked(facts, alerts, options))
    path = bounded.in_time(partial(find_run, path), READ_S)
    run_id, _ = bounded.in_time(partial(read_identity, path), READ_S)
    places = [options.state] if options.state else memory.places_of(path, run_id, dict(os.environ))
    file = MemoryFile(places)
    with file.locked():
        before = file.read()
        facts, alerts = _judged(path, options, now, before.step)
        new = memory.changes(before, alerts)
        found = _looked(facts, new.fired, options)
        status = facts.state.status
        kept = memory.after(before, alerts, now, status.step if status is not None else None)
        kept = delivery.with_messages(kept, delivery.messages(facts, new, found), options.targets)
        return RunCheck(facts, alerts, new, found, tuple(_reported(file, kept, options.targets)))


def _judged(
    path: Path, options: CheckOptions, now: float, seen: StepSeen | None
) -> tuple[AlertFacts, tuple[Alert, ...]]:
    facts = bounded.in_time(partial(read_facts, path, now, seen), READ_S)
    return facts, tuple(judge(facts, options.limits, options.window_s))


def _looked(facts: AlertFacts, alerts: Sequence[Alert], options: CheckOptions) -> dict[str, tuple[str, ...]]:
    looked = {alert.key: actions.act(alert, facts, options.action_s) for alert in alerts} if options.action_s else {}
    return {key: lines for key, lines in looked.items() if lines}


def _reported(file: MemoryFile, kept: AlertMemory, targets: Sequence[Target]) -> list[str]:
    """Keep the memory, then send: a message may come twice where this process is killed between, and is never lost."""
    why = file.write(kept)
    errors = [f"what was reported cannot be kept, so it is reported again at the next check: {why}"] if why else []
    if kept.undelivered:
        left, told = delivery.deliver(kept, targets)
        errors += told
        if left != kept:
            file.write(left)
    return errors
