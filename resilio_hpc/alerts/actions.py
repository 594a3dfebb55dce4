"""What an alert sets off: a diagnosis of the run's stability, or a look at its storage (OPS-6).

Each is a process of its own with a deadline, since logs and file systems may hang. It changes nothing of the run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence

from resilio_hpc.alerts.alert import Alert
from resilio_hpc.alerts.of_progress import USEFUL
from resilio_hpc.alerts.run_facts import AlertFacts
from resilio_hpc.core.errors import CommandError
from resilio_hpc.core.json_fields import Fields, parse_object, printable
from resilio_hpc.core.process import run
from resilio_hpc.events.phrases import plural, seconds
from resilio_hpc.launch.process import bootstrap
from resilio_hpc.report.accounting.causes import US, totals
from resilio_hpc.report.chain.checkpoint_facts import PROBLEMS, TIERS, checkpoint_facts
from resilio_hpc.report.chain.recoveries import recoveries

DEADLINE_S = 20.0
MOST = 3  # causes and failures that are named
ACTS = {"low_goodput": "stability diagnosis", "slow_save": "storage check"}
"""Alert → the look that it sets off."""
Ask = Callable[[Sequence[str], float], str]
"""Runs a command of ``resilio`` for so many seconds at most, and returns its output. Raises CommandError."""


def ask(words: Sequence[str], deadline_s: float) -> str:
    """Run a command of ``resilio`` in a process of its own. Raises CommandError where it takes too long."""
    return run([*bootstrap.command("cli.main"), *words], deadline_s, check=False).stdout


def act(alert: Alert, facts: AlertFacts, deadline_s: float = DEADLINE_S, ask: Ask = ask) -> tuple[str, ...]:
    """Return what the look found, in lines; none where the alert sets off no look."""
    if alert.name not in ACTS:
        return ()
    found = _stability(facts) if alert.name == "low_goodput" else _saves(facts)
    asked = _diagnosis if alert.name == "low_goodput" else _storage
    try:
        return (*found, *asked(facts, deadline_s, ask))
    except CommandError as error:
        return (*found, f"the {ACTS[alert.name]} was not done: {printable(str(error).partition(': ')[2], 200)}")


def _stability(facts: AlertFacts) -> list[str]:
    """Return what the time was lost to, and which failures came again and again."""
    lost = {cause: us for cause, us in totals(facts.time.spans).items() if us and cause not in USEFUL}
    longest = sorted(lost, key=lambda cause: -lost[cause])[:MOST]
    lines = ["time went to " + ", ".join(f"{cause.value} ({seconds(lost[cause] / US)})" for cause in longest)]
    found = recoveries(facts.events, facts.time, facts.active)
    kinds = Counter((one.fault.kind, one.fault.node) for one in found)
    for (kind, node), count in kinds.most_common(MOST):
        where = f" on {printable(node, 60)}" if node else ""
        lines.append(f"{plural(count, 'failure')} of kind {printable(kind, 40)}{where}")
    causes = Counter(one.cause for one in found if one.cause)
    lines += [f"{plural(count, 'time')}: {printable(cause, 200)}" for cause, count in causes.most_common(1)]
    return lines


def _diagnosis(facts: AlertFacts, deadline_s: float, ask: Ask) -> list[str]:
    f = Fields.of(parse_object(ask(["diagnose", str(facts.path), "--json"], deadline_s)))
    if not f.text("label"):
        return ["the logs could not be judged"]
    sure = f.number("confidence") or 0.0
    lines = [f"the logs say: {printable(f.text('label'), 40)}: {printable(f.text('says'), 200)} ({sure:.0%} sure)"]
    if f.text("line"):
        lines.append(f"{printable(f.text('where'), 200)}: {printable(f.text('line'), 200)}")
    return lines


def _saves(facts: AlertFacts) -> list[str]:
    """Return what the ledger says of the saves' tiers and problems."""
    found = checkpoint_facts(facts.events, facts.time)
    lines = []
    if found.commit_s is not None:
        lines.append(f"a commit itself took {seconds(found.commit_s.median)} (median of {found.commit_s.count})")
    if found.blocked_s is not None:
        lines.append(f"training waited for a snapshot for {seconds(found.blocked_s.median)} (median)")
    for tier in found.tiers:
        if tier.bytes_per_s:
            lines.append(f"{TIERS[tier.tier]}: {tier.bytes_per_s / 1e9:.2f} GB/s a node (median)")
    lines += [f"{plural(count, 'time')}: a step {PROBLEMS[kind]}" for kind, count in found.problems.items()]
    return lines


def _storage(facts: AlertFacts, deadline_s: float, ask: Ask) -> list[str]:
    words = ["doctor", "run-directory", "direct-io", "--run-dir", str(facts.path), "--json"]
    told = ask([*words, "--limit", str(max(1, int(deadline_s)))], deadline_s)
    try:
        data = json.loads(told)
    except ValueError:
        return ["the file system could not be looked at"]
    lines = []
    for check in Fields.of(data).each("checks"):
        if check.text("name") in ("run-directory", "direct-io"):
            todo = f"; {check.text('todo')}" if check.text("todo") else ""
            lines.append(printable(f"{check.text('name')}: {check.text('state')}, {check.text('seen')}{todo}", 300))
    return lines or ["the file system could not be looked at"]
