"""From the table to a verdict on this node: which checks are due, and their joint result."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from resilio_hpc.prolog_epilog.base.check import Check, Context, NodeVerdict, Result, Unreadable
from resilio_hpc.prolog_epilog.base.node import NodeView, boot_id, uptime_s
from resilio_hpc.prolog_epilog.base.probe import Probe, Source
from resilio_hpc.prolog_epilog.base.processes import jobs_here
from resilio_hpc.prolog_epilog.base.table import Table
from resilio_hpc.prolog_epilog.checks import registry
from resilio_hpc.prolog_epilog.run import baseline
from resilio_hpc.prolog_epilog.run.runner import CheckRunner, RunMemory


@dataclass(frozen=True)
class HealthRun:
    """Checks of ``table`` on ``node``, Slurm's ``name``. ``said`` is called with why there is no baseline."""

    table: Table
    node: NodeView
    name: str
    sources: Mapping[str, Source] = field(default_factory=lambda: registry.SOURCES)
    probes: Mapping[str, Probe] = field(default_factory=lambda: registry.PROBES)
    unix_time: Callable[[], float] = time.time
    said: Callable[[str], None] = lambda _: None

    def now_s(self) -> float:
        return uptime_s(self.node.root)

    def boot(self) -> str:
        return boot_id(self.node.root)

    def run(self, checks: Iterable[Check], memory: RunMemory) -> list[Result]:
        """Run checks, without those for an idle node while a job is here, or where one came meanwhile."""
        wanted = list(checks)
        if self._busy():
            wanted = [check for check in wanted if not only_idle(check)]
        if memory.normal is None:
            memory.normal = self.normal()
        runner = CheckRunner(self.sources, self.probes, self.node, self.now_s, memory=memory)
        results = runner.run(wanted)
        if any(only_idle(check) for check in wanted) and self._busy():
            idle = {check.id for check in wanted if only_idle(check)}
            results = [result for result in results if result.check not in idle]
        return results

    @property
    def baseline_directory(self) -> Path | None:
        """Return where the site keeps baselines; None in a table without settings."""
        settings = self.table.settings.get("baseline")
        return None if settings is None else Path(settings.text("directory"))

    def normal(self) -> baseline.Values:
        """Return the baseline's values of this node, as far as it was learned and can be read."""
        if self.baseline_directory is None:
            return {}
        values, trouble = baseline.load(self.baseline_directory, self.name)
        if trouble:
            self.said(trouble)
        return values

    def learn(self, checks: Iterable[Check]) -> tuple[list[Result], baseline.Values]:
        """Return the present values for a baseline, with the results of the checks that looked."""
        runner = CheckRunner(self.sources, self.probes, self.node, self.now_s, memory=RunMemory(normal={}))
        return runner.run(list(checks)), runner.learned

    def verdict(self, results: Iterable[Result]) -> NodeVerdict:
        """Return the verdict of these results, as of now."""
        return NodeVerdict(
            node=self.name,
            boot=self.boot(),
            uptime_s=self.now_s(),
            unix_s=self.unix_time(),
            results=tuple(results),
            gpus=len(self.node.files.names("/dev", r"nvidia\d+")),
        )

    def _busy(self) -> bool:
        """Return whether a job is here. In doubt, yes: checks of an idle node would blame it for a job's use."""
        try:
            return bool(jobs_here(self.node.files))
        except Unreadable:
            return True


def only_idle(check: Check) -> bool:
    """Return whether a check tells something only while no job is on the node."""
    return "health" not in check.contexts and "start" not in check.contexts and "idle" in check.contexts


_SELDOM_S = 600.0


def due(check: Check, age_s: float, asked: bool) -> bool:
    """Return whether to look again.

    A request for a new verdict means checks that change from job to job, not those that look every hour: these may ask
    Slurm, and all nodes of a large job would do so at once.
    """
    return age_s >= check.every_s or (asked and check.every_s < _SELDOM_S)


def of_context(table: Table, *contexts: Context) -> list[Check]:
    """Return the enabled checks of any of these contexts."""
    return [check for check in table.checks.values() if check.enabled and set(contexts) & set(check.contexts)]


def node_name(environment: Mapping[str, str]) -> str:
    """Return Slurm's name of this node, or the first part of its host name."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def only_warned(verdict: NodeVerdict, checks: Mapping[str, str]) -> NodeVerdict:
    """Return the same verdict, in which these checks only warn; each with why. Pure."""

    def softened(result: Result) -> Result:
        if result.check not in checks:
            return result
        faults = [
            msgspec.structs.replace(
                one, on_fail="warn", evidence=f"{one.evidence} (only a warning: {checks[result.check]})"
            )
            for one in result.faults
        ]
        return msgspec.structs.replace(result, on_fail="warn", faults=tuple(faults))

    return msgspec.structs.replace(verdict, results=tuple(map(softened, verdict.results)))


def withheld(verdict: NodeVerdict, why: str) -> NodeVerdict:
    """Return the same verdict, withheld. Pure."""
    return msgspec.structs.replace(verdict, withheld=why)
