"""Drains by way of ``slurm.drain.writer``, which compares before it writes and stops in a storm."""

from __future__ import annotations

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.slurm.client.client import SlurmClient
from resilio_hpc.slurm.client.model import Node
from resilio_hpc.slurm.client.this_node import VARIABLE
from resilio_hpc.slurm.drain.drain import slurms_own
from resilio_hpc.slurm.drain.outcome import DrainOutcome, DrainResult
from resilio_hpc.slurm.drain.reason import Finding, read_reason
from resilio_hpc.slurm.drain.writer import DrainWriter


class SlurmDrainer:
    """A ``node_drains.Drainer``. ``client``: the writer's, or another that reads the same."""

    def __init__(self, client: SlurmClient, writer: DrainWriter) -> None:
        self._client = client
        self._writer = writer
        self._seen: Node | None = None
        self._offered: tuple[str, int | None] | None = None

    def drain(self, node: str, check_id: str, evidence: str) -> DrainOutcome:
        """See Drainer."""
        return self._writer.drain(node, Finding(check_id, evidence))

    def room(self, node: str) -> str:
        """See Drainer."""
        return self._writer.room(node)

    def held(self, node: str) -> frozenset[str]:
        """See Drainer."""
        found = self._seen = next(iter(self._client.nodes([node])), None)
        if found is None:
            raise SlurmError(f"Slurm knows no node {node}: set {VARIABLE} to this machine's NodeName")
        ours = read_reason(found.reason) if found.state.drain else None
        return frozenset(finding.check for finding in ours or ())

    def drained(self) -> bool:
        """See Drainer."""
        return self._seen is not None and self._seen.state.drain

    def adopt(self, node: str, check_id: str, evidence: str, failed_unix_s: float) -> str:
        """See Drainer."""
        outcome = _answered(self._writer.adopt(node, Finding(check_id, evidence), failed_unix_s))
        return f"adopted: {outcome.why}" if outcome.result is DrainResult.REWORDED else ""

    def offer(self, node: str, passes: int) -> str:
        """See Drainer. "Kill task failed" passes when the processes have ended."""
        seen = self._seen
        row = slurms_own(seen.reason) if seen is not None and seen.state.drain else None
        if seen is None or row is None or not row.offer or self._offered == (seen.reason, seen.reason_time):
            return ""
        outcome = _answered(self._writer.recheck(node, passes))
        if outcome.result is not DrainResult.OFFERED:
            return ""
        self._offered = (seen.reason, seen.reason_time)
        return f"offered: {outcome.why}"

    def undrain(self, node: str, check_id: str, passes: int) -> str:
        """See Drainer."""
        outcome = _answered(self._writer.undrain(node, check_id, passes))
        return "" if outcome.result is DrainResult.NOTHING else f"{outcome.result}: {check_id}: {outcome.why}"


def _answered(outcome: DrainOutcome) -> DrainOutcome:
    """Raise SlurmError where Slurm did not answer, or refused."""
    if outcome.result in (DrainResult.UNKNOWN, DrainResult.REFUSED):
        raise SlurmError(f"{outcome.node}: {outcome.why}")
    return outcome
