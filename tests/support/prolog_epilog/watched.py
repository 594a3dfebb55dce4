"""A node daemon over a tree of a node that the test makes, with drains that are asked of the test."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.prolog_epilog.base.check import Check, Fault
from resilio_hpc.prolog_epilog.base.node import NodeView
from resilio_hpc.prolog_epilog.base.probe import Probe, Source
from resilio_hpc.prolog_epilog.base.table import Table
from resilio_hpc.prolog_epilog.daemon.watch import Watch
from resilio_hpc.prolog_epilog.drain.node_drains import NodeDrains
from resilio_hpc.prolog_epilog.run.cached_verdict import VerdictCache
from resilio_hpc.prolog_epilog.run.health_run import HealthRun
from resilio_hpc.slurm.drain.outcome import DrainOutcome, DrainResult
from tests.support.prolog_epilog.node_trees import write


def check(name: str, every_s: float, *contexts: str, on_fail: str = "drain") -> Check:
    row: dict[str, Any] = {"contexts": contexts or ("health",), "on_fail": on_fail, "severity": "error"}
    return Check(id=name, source=name, budget_s=20, reason="r", summary="s", origin="o", every_s=every_s, **row)


@dataclass
class Drainer:
    """One that does as the test says, and notes what it was asked. ``answers``: by check, in place of ``answer``."""

    answer: DrainResult | SlurmError = DrainResult.DRAINED
    answers: dict[str, DrainResult] = field(default_factory=dict)
    needed: int = 3
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    holds: set[str] = field(default_factory=set)
    looks: int = 0
    why_no_room: str = ""
    by_prolog: bool = False  # Slurm has drained the node for a failed prolog
    adopted: list[tuple[str, str, float]] = field(default_factory=list)
    rooms: int = 0

    def _answer(self) -> DrainResult:
        if isinstance(self.answer, SlurmError):
            raise self.answer
        return self.answer

    def drain(self, node: str, check_id: str, evidence: str) -> DrainOutcome:
        self.asked.append((node, check_id, evidence))
        if isinstance(self.answer, SlurmError):
            return DrainOutcome(node, DrainResult.UNKNOWN, str(self.answer))
        result = self.answers.get(check_id, self.answer)
        if result is DrainResult.DRAINED:
            self.holds.add(check_id)
        elif result is not DrainResult.LEFT:  # it came too late, and was taken back
            self.holds.discard(check_id)
        return DrainOutcome(node, result, "too many nodes")

    def room(self, node: str) -> str:
        self.rooms += 1
        self._answer()
        return self.why_no_room

    def held(self, node: str) -> frozenset[str]:
        self.looks += 1
        self._answer()
        return frozenset(self.holds)

    def drained(self) -> bool:
        return bool(self.holds) or self.answer is DrainResult.LEFT or self.by_prolog

    def adopt(self, node: str, check_id: str, evidence: str, failed_unix_s: float) -> str:
        if not self.by_prolog:
            return ""
        self.by_prolog = False
        self.holds.add(check_id)
        self.adopted.append((check_id, evidence, failed_unix_s))
        return f"adopted: {check_id}"

    def offer(self, node: str, passes: int) -> str:
        return f"offered: to end a drain of Slurm's on {node}" if passes >= self.needed else ""

    def undrain(self, node: str, check_id: str, passes: int) -> str:
        if passes < self.needed:
            return ""
        self.holds.remove(check_id)
        return f"undrained: {check_id}"


class Daemon:
    """A watch over a tree; ``broken`` names what fails. Looks are counted in files, since children make them."""

    def __init__(self, folder: Path, drainer: Drainer | None = None) -> None:
        self.root = write(folder / "root")
        self.counts = folder / "counts"
        self.counts.mkdir()
        (folder / "run").mkdir()
        self.cache = VerdictCache(folder / "run" / "health")
        self.said: list[str] = []
        self.broken: set[str] = set()
        checks = [check("fast", 10), check("slow", 3600), check("idle", 60, "idle"),
                  check("device", 10, on_fail="evict")]  # fmt: skip
        table = Table({one.id: one for one in checks}, {})
        sources = {one.id: Source(self.fetch(one.id)) for one in checks}
        probes = {one.id: Probe.of(lambda reading, limits: reading) for one in checks}
        health_run = HealthRun(table, NodeView(root=self.root), "n1", sources, probes, lambda: 1e9)
        drains = NodeDrains(drainer, self.said.append) if drainer is not None else None
        self.watch = Watch(health_run, self.cache, self.said.append, drains)
        self.at(1000.0)

    def fetch(self, name: str) -> Any:
        def look(node: NodeView) -> list[Fault]:
            with (self.counts / name).open("a") as file:
                file.write("x")
            return [Fault("it is broken")] if name in self.broken else []

        return look

    def at(self, uptime_s: float) -> None:
        (self.root / "proc/uptime").write_text(f"{uptime_s:.2f} 1.0\n")

    def looks(self) -> list[int]:
        return [len(path.read_text()) if path.exists() else 0
                for path in (self.counts / name for name in ("fast", "slow", "idle"))]  # fmt: skip
