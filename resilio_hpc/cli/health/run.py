"""``resilio health run | clear | watch | epilog``: what looks at the node, or changes what is kept of it."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from resilio_hpc.core.errors import HealthError, SlurmError, UsageError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.prolog_epilog.base import table as tables
from resilio_hpc.prolog_epilog.base.check import Check, Result, Verdict
from resilio_hpc.prolog_epilog.base.node import Node
from resilio_hpc.prolog_epilog.base.node_files import NodeFiles
from resilio_hpc.prolog_epilog.daemon.report_intake import ReportIntake
from resilio_hpc.prolog_epilog.daemon.watch import Watch
from resilio_hpc.prolog_epilog.drain.fault_record import FaultRecord
from resilio_hpc.prolog_epilog.drain.node_drains import NodeDrains, SlurmDrainer
from resilio_hpc.prolog_epilog.hooks import epilog as epilogs
from resilio_hpc.prolog_epilog.hooks import process_cleanup
from resilio_hpc.prolog_epilog.run.cached_verdict import NoVerdict, VerdictCache
from resilio_hpc.prolog_epilog.run.health_run import HealthRun, due, node_name, of_context
from resilio_hpc.prolog_epilog.run.runner import Memory
from resilio_hpc.slurm.client import this_node
from resilio_hpc.slurm.client.which_client import which
from resilio_hpc.slurm.drain.policy import drain_policy
from resilio_hpc.slurm.drain.writer import DrainWriter
from resilio_hpc.slurm.node_faults.ledger import FaultLedger
from resilio_hpc.slurm.orders.audit import DEFAULT_PATH, PATH_VARIABLE, AuditLog

POLL_S = 0.5
NAME_AGAIN_S = 60.0
_MARKS = {"pass": "ok", "fail": "FAIL", "unknown": "?", "timeout": "HANGS", "absent": "-"}


def health_run_of(options: argparse.Namespace) -> HealthRun:
    """This node's, with the site's table. Raises UsageError."""
    table = tables.load(options.site)
    node = Node(settings=table.settings)
    return HealthRun(table, node, node_name(os.environ), said=lambda text: print(f"resilio: {text}", file=sys.stderr))


def run(options: argparse.Namespace) -> int:
    """Exit code 1 where something was found that keeps jobs off the node."""
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
        memory = cache.memory(boot)  # what was kept gives counters a past; nothing is kept here
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
    """Write a fresh verdict without leave for prologs; what the checks of these names find now. Raises HealthError."""
    table = tables.load()
    health_run = HealthRun(table, Node(settings=table.settings), node)
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
) -> Verdict | None:
    """One look that is kept, at what is due and at what is ``forced``; None where another process is at it."""
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
    """Begin anew with a check."""
    health_run = health_run_of(options)
    check = health_run.table.check(options.check)
    change_memory(
        health_run, VerdictCache(options.directory), lambda memory: memory.clear(check.id, health_run.now_s())
    )
    print(f'{{"cleared": "{check.id}"}}' if options.json else f"{check.id}: what it found until now is forgotten")
    return 0


def change_memory(health_run: HealthRun, cache: VerdictCache, change: Callable[[Memory], None]) -> None:
    """Change what checks keep, while none runs, and have them look anew. Raises HealthError."""
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


def watch(options: argparse.Namespace) -> int:
    """Look for ever. Ends with SIGTERM or SIGINT."""

    def said(text: str) -> None:
        print(text if not options.json else msgspec.json.encode({"said": text}).decode(), flush=True)

    drains = NodeDrains(_drainer(options), said) if options.drain != "off" else None
    health_run = health_run_of(options)
    intake = ReportIntake(options.reports, health_run.name, said, time.time) if options.reports is not None else None
    faults = FaultRecord(FaultLedger(options.faults), said) if options.faults is not None else None
    daemon = Watch(health_run, VerdictCache(options.directory), said, drains, intake, faults)
    ended: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: ended.append(number))
    naming = Naming(daemon.rename, said)
    while not ended:
        naming.turn(time.monotonic())
        daemon.turn()
        if options.once:
            break
        if not ended:
            time.sleep(POLL_S)
    return 0


@dataclass
class Naming:
    """Asks Slurm, until it answers, for the name that the node has there. ``known`` gets it."""

    known: Callable[[str], None]
    said: Callable[[str], None]
    ask: Callable[[], str] = this_node.node_name
    _next_s: float | None = -math.inf
    _trouble: str = ""

    def turn(self, now_s: float) -> None:
        """``now_s``: monotonic seconds."""
        if self._next_s is None or now_s < self._next_s:
            return
        try:
            self.known(self.ask())
            self._next_s = None
        except SlurmError as error:
            self._next_s = now_s + NAME_AGAIN_S
            if str(error) != self._trouble:
                self._trouble = str(error)
                self.said(f"what Slurm calls this node is not known, its host name is used: {error}")


def _drainer(options: argparse.Namespace) -> SlurmDrainer:
    client = which()
    log = AuditLog(Path(os.environ.get(PATH_VARIABLE) or DEFAULT_PATH))
    return SlurmDrainer(client, DrainWriter(client, drain_policy(options.policy), log, options.drain))


def epilog(options: argparse.Namespace) -> int:
    """Remove what the job left, and say what was done."""
    job = epilogs.job_of(os.environ)
    files = NodeFiles()
    policy = epilogs.Policy.of(tables.load(options.site).settings["epilog"])
    entries = process_cleanup.see_entries(files, (*policy.clean, *policy.cached), time.time())
    plan = epilogs.decide(job, process_cleanup.see_processes(files), entries, policy)
    if options.dry_run:
        done = epilogs.would_be(job, plan)
    else:
        done = process_cleanup.carry_out(job, plan, policy, files)
    print(msgspec.json.encode(done).decode() if options.json else _epilog_text(done, options.dry_run), flush=True)
    return 0


def _epilog_text(done: epilogs.Done, dry_run: bool) -> str:
    would = "would be " if dry_run else ""
    parts = [f"{done.killed} processes {would}ended", f"{len(done.removed)} leftovers {would}removed"]
    parts += [f"{len(done.kept)} kept"] if done.kept else []
    parts += [done.why] if done.why else []
    parts += [f"failed: {text}" for text in done.failed[:5]]
    return printable(f"epilog of job {done.job}: {', '.join(parts)}", 500)


def as_json(verdict: Verdict) -> str:
    """For programs: the verdict with its action and findings."""
    whole = {
        **msgspec.to_builtins(verdict),
        "action": verdict.action,
        "findings": msgspec.to_builtins(verdict.findings),
    }
    return msgspec.json.format(msgspec.json.encode(whole), indent=1).decode()


def _as_text(verdict: Verdict, time_s: bool) -> str:
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
    """``13 of 14 checks passed, 7 could not be read``: what could not be read has neither passed nor failed. Pure."""
    counts = Counter(result.status for result in results)
    judged = counts["pass"] + counts["fail"] + counts["timeout"]
    unread = f", {counts['unknown']} could not be read" if counts["unknown"] else ""
    return f"{counts['pass']} of {judged} checks passed{unread}"


def text_of(verdict: Verdict) -> str:
    """For people: every check on a line, and what it comes to."""
    return _as_text(verdict, time_s=False)
