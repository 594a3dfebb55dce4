"""``resilio health run | clear``: run checks, or forget their findings."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import msgspec

from resilio_hpc.core.errors import HealthError, UsageError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.prolog_epilog.base import table as tables
from resilio_hpc.prolog_epilog.base.check import Check, NodeVerdict, Result
from resilio_hpc.prolog_epilog.base.node import NodeView
from resilio_hpc.prolog_epilog.run.cached_verdict import NoVerdict, VerdictCache
from resilio_hpc.prolog_epilog.run.health_run import HealthRun, due, node_name, of_context
from resilio_hpc.prolog_epilog.run.runner import RunMemory

_MARKS = {"pass": "ok", "fail": "FAIL", "unknown": "?", "timeout": "HANGS", "absent": "-"}


def health_run_of(options: argparse.Namespace) -> HealthRun:
    """Return this node's checks, with the site's table.

    Raises UsageError.
    """
    table = tables.load(options.site)
    node = NodeView(settings=table.settings)
    return HealthRun(table, node, node_name(os.environ), said=lambda text: print(f"resilio: {text}", file=sys.stderr))


def run(options: argparse.Namespace) -> int:
    """Run the checks. Return 1 for a finding that keeps jobs off the node."""
    health_run = health_run_of(options)
    cache = VerdictCache(options.directory)
    checks = _chosen(options, health_run)
    if options.write:
        if options.checks:
            raise UsageError("--write keeps a verdict on the whole node: name no checks")
        verdict = _written(health_run, cache, checks)
        if verdict is None:
            return 0
    else:
        boot = health_run.boot()
        memory = cache.memory(boot)  # counters need their past; nothing is kept here
        verdict = health_run.verdict(health_run.run(checks, memory))
    if not options.quiet:
        print(as_json(verdict) if options.json else _as_text(verdict, time_s=True))
    return 1 if verdict.action in ("evict", "fail", "drain") else 0


def _chosen(options: argparse.Namespace, health_run: HealthRun) -> list[Check]:
    if options.checks:
        return [health_run.table.check(name) for name in dict.fromkeys(options.checks)]
    contexts = ("health", "idle") if options.context == "health" else (options.context,)
    return of_context(health_run.table, *contexts)


def look_again(node: str, names: Collection[str]) -> dict[str, str]:
    """Write a new verdict without leave for prologs; return the findings of these checks now. Raises HealthError."""
    table = tables.load()
    health_run = HealthRun(table, NodeView(settings=table.settings), node)
    checks = of_context(table, "health", "idle")
    until = time.monotonic() + 10.0
    while (verdict := _written(health_run, VerdictCache(), checks, names)) is None:
        if time.monotonic() > until:
            raise HealthError("the checks are running: try again in a moment")
        time.sleep(0.1)
    return {
        one.check: one.evidence for one in reversed(verdict.findings) if one.check in names and one.action != "warn"
    }


def _written(
    health_run: HealthRun, cache: VerdictCache, checks: list[Check], forced: Collection[str] = ()
) -> NodeVerdict | None:
    """Run due and ``forced`` checks once and keep the verdict; return None where another process runs them."""
    with cache.locked() as ours:
        if not ours:
            return None
        asked = cache.take_request()
        boot, now = health_run.boot(), health_run.now_s()
        former = {result.check: result for result in _former(cache, now, boot)}
        now_due = [
            check for check in checks
            if check.id in forced
            or check.id not in former
            or due(check, now - former[check.id].uptime_s, asked)
        ]  # fmt: skip
        memory = cache.memory(boot)
        kept = {check.id: former[check.id] for check in checks if check not in now_due}
        looked = {result.check: result for result in health_run.run(now_due, memory)}
        results = {**kept, **looked}
        verdict = health_run.verdict(results[check.id] for check in checks if check.id in results)
        try:
            cache.keep(memory, boot)
        finally:
            cache.write(verdict)
        return verdict


def _former(cache: VerdictCache, now: float, boot: str) -> tuple[Result, ...]:
    try:
        return cache.read(now, math.inf, boot).results
    except NoVerdict:
        return ()


def clear(options: argparse.Namespace) -> int:
    """Forget a check's findings."""
    health_run = health_run_of(options)
    check = health_run.table.check(options.check)
    change_memory(
        health_run, VerdictCache(options.directory), lambda memory: memory.clear(check.id, health_run.now_s())
    )
    print(f'{{"cleared": "{check.id}"}}' if options.json else f"{check.id}: what it found until now is forgotten")
    return 0


def change_memory(health_run: HealthRun, cache: VerdictCache, change: Callable[[RunMemory], None]) -> None:
    """Change what checks keep, while none runs, and let them look again. Raises HealthError."""
    until = time.monotonic() + 10.0
    while True:
        with cache.locked() as ours:
            if ours:
                boot = health_run.boot()
                memory = cache.memory(boot)
                change(memory)
                cache.keep(memory, boot)
                break
        if time.monotonic() > until:
            raise HealthError("the checks are running: try again in a moment")
        time.sleep(0.1)
    (cache.directory / "wanted").touch()


def as_json(verdict: NodeVerdict) -> str:
    """Return the verdict with its action and findings, for programs."""
    whole = {
        **msgspec.to_builtins(verdict),
        "action": verdict.action,
        "findings": msgspec.to_builtins(verdict.findings),
    }
    return msgspec.json.format(msgspec.json.encode(whole), indent=1).decode()


def _as_text(verdict: NodeVerdict, time_s: bool) -> str:
    lines = []
    for result in verdict.results:
        took = f"{result.seconds * 1000:7.0f} ms" if time_s else ""
        said = "; ".join([*(fault.evidence for fault in result.faults), *([result.note] if result.note else [])])
        lines.append(f"{_MARKS[result.status]:<6}{result.check:<26}{took}  {printable(said, 200)}".rstrip())
    return "\n".join([*lines, f"{verdict.node}: {_counted(verdict.results)}; {_SUMMARY.get(verdict.action, '')}"])


_SUMMARY = {
    "none": "nothing is wrong",
    "warn": "jobs may run",
    **{action: f"asks to {action}" for action in ("evict", "fail", "drain")},
}


def _counted(results: Sequence[Result]) -> str:
    """Return ``13 of 14 checks passed, 7 could not be read``: unreadable ones have neither passed nor failed. Pure."""
    counts = Counter(result.status for result in results)
    judged = counts["pass"] + counts["fail"] + counts["timeout"]
    unread = f", {counts['unknown']} could not be read" if counts["unknown"] else ""
    return f"{counts['pass']} of {judged} checks passed{unread}"


def text_of(verdict: NodeVerdict) -> str:
    """Return every check on a line, and the conclusion, for people."""
    return _as_text(verdict, time_s=False)
