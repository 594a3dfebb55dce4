"""Findings of health checks, remembered across reboots: from a verdict to the ledger of ``slurm.node_faults``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import InitVar, dataclass

from resilio_hpc.core.errors import HealthError
from resilio_hpc.prolog_epilog.base.check import NodeVerdict
from resilio_hpc.prolog_epilog.base.isolated import OneAtATime
from resilio_hpc.slurm.node_faults.fault import NodeFault, evidence
from resilio_hpc.slurm.node_faults.ledger import FaultLedger

BUDGET_S = 5.0
_KINDS = {"fatal": "health-fatal", "error": "health-error"}


def faults_of(verdict: NodeVerdict, known: Collection[tuple[str, str]]) -> list[NodeFault]:
    """Return faults that keep jobs off the node or a device, and are not ``known``: (check, device). Pure."""
    return [
        NodeFault(
            time=max(0.0, verdict.unix_s), node=verdict.node, kind=_KINDS[one.severity], check=one.check,
            device=one.device, evidence=evidence(one.evidence),
        )
        for one in verdict.findings
        if one.action != "warn" and one.severity in _KINDS and (one.check, one.device) not in known
    ]  # fmt: skip


@dataclass
class FaultRecord:
    """Keeps what is new since the last verdict; what could not be kept is tried again with the next.

    A child writes, since the node's own disk may be faulty. ``said`` is called with a line for each change. A child
    that takes longer than ``budget_s`` is given up.
    """

    ledger: FaultLedger
    said: Callable[[str], None]
    budget_s: InitVar[float] = BUDGET_S
    _known: frozenset[tuple[str, str]] = frozenset()
    _trouble: str = ""

    def __post_init__(self, budget_s: float) -> None:
        self._child = OneAtATime(budget_s)

    def turn(self, verdict: NodeVerdict) -> None:
        """Record the findings of a look; call it after each look."""
        new = faults_of(verdict, self._known)
        present = frozenset((one.check, one.device) for one in verdict.findings)
        trouble = self._kept(new) if new else ""
        lost = {(one.check, one.device) for one in new} if trouble else set()
        self._known = present - lost
        if trouble and trouble != self._trouble:
            self.said(trouble)
        self._trouble = trouble

    def _kept(self, faults: list[NodeFault]) -> str:
        """Return why it failed, or ""."""
        where = self.ledger.directory

        def work() -> bytes:
            try:
                self.ledger.append(faults)
            except (HealthError, ValueError) as error:
                return str(error).encode(errors="replace")
            return b"kept"

        answer = self._child.answer(where, work)
        if answer is None:
            return f"{where} does not answer: faults are not remembered"
        said = answer.decode(errors="replace").strip()
        return "" if said == "kept" else said
