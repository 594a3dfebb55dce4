"""The node daemon: every check at its own pace, a verdict that is never old, drains where they are asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from resilio_hpc.core.errors import HealthError
from resilio_hpc.prolog_epilog.base.check import Check, NodeVerdict, Result
from resilio_hpc.prolog_epilog.daemon.report_intake import ReportIntake
from resilio_hpc.prolog_epilog.drain.fault_record import FaultRecord
from resilio_hpc.prolog_epilog.drain.node_drains import NodeDrains
from resilio_hpc.prolog_epilog.run.cached_verdict import VerdictCache
from resilio_hpc.prolog_epilog.run.health_run import HealthRun, due, of_context

REWRITE_S = 60.0
"""A verdict is written at least so often, since its age says that the daemon still looks."""


@dataclass
class Watch:
    """The daemon. Call ``turn`` regularly. ``said`` is called with a line for each change."""

    health_run: HealthRun
    cache: VerdictCache
    said: Callable[[str], None]
    drains: NodeDrains | None = None
    reports: ReportIntake | None = None
    faults: FaultRecord | None = None
    _results: dict[str, Result] = field(default_factory=dict)
    _looked_s: dict[str, float] = field(default_factory=dict)
    _baseline_of: str = ""
    _last_lines: frozenset[str] = frozenset()
    _written_s: float = -REWRITE_S

    def turn(self) -> NodeVerdict | None:
        """Run what is due, or everything on request; None where nothing was due, or another process runs the checks."""
        now = self.health_run.now_s()
        asked = self.cache.take_request() | (self.reports is not None and self.reports.wanted(now))
        again = self.drains.again if self.drains is not None else ()
        wanted = [
            check for check in self._checks()
            if check.id in again or due(check, now - self._looked_s.get(check.id, -math.inf), asked)
        ]  # fmt: skip
        if not wanted and now - self._written_s < REWRITE_S:
            return None
        with self.cache.locked() as ours:
            if not ours:
                return None
            self._look(wanted, now)
        verdict = self.health_run.verdict(self._results.values())
        if self.drains is not None:
            verdict = self.drains.turn(verdict, self.cache.refusal())
        self._write(verdict)
        if self.faults is not None:
            self.faults.turn(verdict)
        self._tell(verdict)
        return verdict

    def rename(self, node: str) -> None:
        """Take Slurm's name of the node."""
        self.health_run = replace(self.health_run, name=node)
        if self.reports is not None:
            self.reports.node = node

    def _checks(self) -> list[Check]:
        return of_context(self.health_run.table, "health", "idle")

    def _look(self, wanted: list[Check], now: float) -> None:
        boot = self.health_run.boot()
        memory = self.cache.memory(boot)
        if self._baseline_of != self.health_run.name:  # the daemon has started, or has learned Slurm's name of the node
            memory.normal, self._baseline_of = None, self.health_run.name
        for check in wanted:
            self._results.pop(check.id, None)  # a check that is left out now has no result any more
        looked = self.health_run.run(wanted, memory)
        self._results |= {result.check: result for result in looked}
        if self.drains is not None:
            self.drains.looked(looked)
        self._looked_s |= {check.id: now for check in wanted}
        try:
            self.cache.keep(memory, boot)
        except HealthError as error:
            self.said(str(error))

    def _write(self, verdict: NodeVerdict) -> None:
        """Write the verdict. If that fails (memory is full), the old one grows stale, and prologs say so."""
        try:
            self.cache.write(verdict)
            self._written_s = verdict.uptime_s
        except HealthError as error:
            self.said(str(error))

    def _tell(self, verdict: NodeVerdict) -> None:
        """Report what is new since the last verdict.

        Evidence may change from look to look while the fault is the same.
        """
        lines = frozenset(f"{one.action} {one.check} {one.device}".rstrip() for one in verdict.findings)
        for finding in verdict.findings:
            if f"{finding.action} {finding.check} {finding.device}".rstrip() not in self._last_lines:
                self.said(f"{finding.action}: {finding.check}: {finding.evidence}")
        for line in sorted(self._last_lines - lines):
            self.said(f"no more: {line}")
        self._last_lines = lines
