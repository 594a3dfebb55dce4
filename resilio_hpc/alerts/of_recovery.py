"""Alerts on recovery: storms of restarts, budgets, spares, nodes, and time limits that look like failures. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from resilio_hpc.alerts.alert import Alert, Limits, Severity, fire
from resilio_hpc.alerts.run_facts import AlertFacts
from resilio_hpc.core.json_fields import Fields, printable
from resilio_hpc.core.ledger import Event
from resilio_hpc.events.phrases import names, plural, seconds
from resilio_hpc.launch.chain.suspect_nodes import suspect_nodes
from resilio_hpc.report.accounting.causes import US
from resilio_hpc.report.accounting.part_facts import PartFacts
from resilio_hpc.report.faults import RunFault

STORM_S = 3600.0
SIGNS = ("rank_failed", "node_lost", "agent_ended", "agent_left", "slow_start")
KILL_S = 120.0  # between a job's end and the last of its processes (KillWait, and what agents take to notice)


def recent_failures(facts: AlertFacts) -> list[RunFault]:
    """Return the failures of the last hour that ranks noticed, by time; none that was made on purpose."""
    after = facts.until - STORM_S
    found = [one for one in facts.faults if one.kind != "spare_lost" and not one.drill]
    return [one for one in found if after < one.time <= facts.now + KILL_S]


def restart_storm(facts: AlertFacts, limits: Limits) -> Iterator[Alert]:
    """Yield the alert where an hour had too many failures."""
    found = recent_failures(facts)
    if not facts.active or len(found) <= limits["restart_storm"]:
        return
    kinds: dict[str, int] = {}
    for fault in found:
        kinds[fault.kind] = kinds.get(fault.kind, 0) + 1
    what = ", ".join(f"{count} {printable(kind, 30).replace('_', ' ')}" for kind, count in kinds.items())
    text = f"{len(found)} failures within an hour: {what}"
    lines = facts.of_kind(*SIGNS, since=found[0].time - 1.0)
    yield fire("restart_storm", found[0].time, text, limits, float(len(found)), lines)


def restarts_left(facts: AlertFacts) -> int | None:
    """Return how many restarts without progress are left; None where that is not known."""
    status, most = facts.state.status, facts.chain.max_restarts
    if not facts.runs or status is None or most is None:
        return None
    return max(0, most - status.without_progress)


def budget_low(facts: AlertFacts, limits: Limits) -> Iterator[Alert]:
    """Yield the alert where few restarts are left, and there was a failure since the newest commit."""
    left, status = restarts_left(facts), facts.state.status
    if left is None or status is None or status.without_progress < 1 or left >= limits["budget_low"]:
        return
    lines = facts.of_kind("decision")
    used = lines[-status.without_progress :]
    text = f"{left} of {facts.chain.max_restarts} restarts are left: no step became durable since the others"
    yield fire("budget_low", used[0].time if used else facts.until, text, limits, float(left), used)


def spares_spent(facts: AlertFacts, limits: Limits) -> Iterator[Alert]:
    """Yield the alert where the job began with spare nodes, and has none left."""
    part = facts.part
    if part is None or not facts.runs or not part.rounds:
        return
    began_with = len(set(part.nodes) - set(part.rounds[0].members))
    if began_with < 1:
        return
    here, last = set(part.nodes), None
    for event in facts.of_kind(
        "agent_joined", "node_lost", "agent_left", "node_returned", "node_left_job", "joins", "round",
        since=part.began.us / US,
    ):  # fmt: skip
        f = Fields(event.fields)
        if event.kind in ("node_lost", "agent_left", "node_left_job"):
            here.discard(f.text("node"))
            last = event
        elif event.kind == "joins":
            here |= set(f.texts("nodes"))
        elif event.kind == "round":
            here |= set(f.texts("members"))
            last = event if set(f.texts("members")) - set(part.rounds[0].members) else last
        else:
            here.add(f.text("node"))
    left = len(here - set(part.rounds[-1].members))
    if left >= limits["spares_spent"]:
        return
    text = f"the job began with {plural(began_with, 'spare node')}, and has {left or 'none'} left"
    since = last.time if last is not None else part.began.us / US
    yield fire("spares_spent", since, text, limits, float(left), [last] if last is not None else [])


def suspect(facts: AlertFacts, limits: Limits) -> Iterator[Alert]:
    """Yield an alert for each node that was at fault of late. Critical where ranks run on it now."""
    if not facts.active:
        return
    after = facts.now - limits["suspect_node"] * 3600
    members = set(facts.part.rounds[-1].members) if facts.part is not None and facts.part.rounds else set()
    by_node: dict[str, list[tuple[float, str]]] = {}
    for fault in suspect_nodes(facts.events, facts.run_id):
        if fault.time >= after:
            by_node.setdefault(fault.node, []).append((fault.time, fault.evidence))
    for node, found in by_node.items():
        lines = [event for event in facts.events if event.time >= after and _names(event, node)]
        used = facts.runs and node in members
        text = f"node {node} was at fault {plural(len(found), 'time')}: {printable(found[-1][1], 200)}"
        if used:
            text += "; ranks run on it"
        severity = Severity.CRITICAL if used else Severity.WARNING
        yield fire("suspect_node", found[0][0], text, limits, float(len(found)), lines, severity, about=node)


def _names(event: Event, node: str) -> bool:
    f = Fields(event.fields)
    if event.kind == "tested":
        return node in (*f.texts("bad"), *f.texts("slow"))
    return event.kind in ("node_lost", "stop_failed", "local_failed", "rank_failed") and f.text("node") == node


def time_limit_as_failure(facts: AlertFacts, limits: Limits) -> Iterator[Alert]:
    """Yield the alert where the newest job that ended had failures just before its time limit.

    It clears when a later job ends without.
    """
    margin = limits["time_limit_as_failure"]
    for one in reversed(facts.time.parts):
        end = _end_time(facts, one.facts)
        if one.facts.over is None and (end is None or facts.until < end - margin):
            continue  # it runs
        found = [
            fault for fault in facts.faults
            if end is not None and not fault.drill and end - margin <= fault.time <= end + KILL_S
            and one.facts.began.us / US <= fault.time <= one.facts.ended.us / US + 1.0
        ]  # fmt: skip
        if found:
            nodes = sorted({fault.node for fault in found if fault.node})
            text = (
                f"job {one.facts.job} reached its time limit, and {plural(len(found), 'failure')} "
                f"on {names(nodes)} {seconds(max(0.0, end - found[0].time if end else 0.0))} before was counted"
            )
            lines = [event for event in facts.of_kind(*SIGNS) if end and event.time >= end - margin]
            value = round((end or 0.0) - found[0].time, 1)
            yield fire("time_limit_as_failure", found[0].time, text, limits, value, lines)
        return


def _end_time(facts: AlertFacts, part: PartFacts) -> float | None:
    """Return the newest known time limit of a part's job, in Unix seconds."""
    found = None
    for event in facts.of_kind("launch", "end_time", since=part.began.us / US):
        if Fields(event.fields).text("job") == part.job and event.time <= part.ended.us / US:
            found = Fields(event.fields).time("end_time") or found
    return found
