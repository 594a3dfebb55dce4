"""Drains by way of ``slurm.drain_writer``, which compares before it writes and stops in a storm."""

from __future__ import annotations

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.prolog_epilog.drains import Answer, Outcome
from resilio_hpc.slurm.client import SlurmClient
from resilio_hpc.slurm.drain_reason import Finding, read_reason
from resilio_hpc.slurm.drain_writer import DrainWriter

_OUTCOMES: dict[str, Outcome] = {
    "drained": "drained",
    "reworded": "drained",
    "nothing": "already",
    "left": "already",
    "overtaken": "already",
    "contested": "already",
    "storm": "withheld",
    "would-act": "withheld",  # who only observes fails no prologs either
}


class SlurmDrainer:
    """A ``drains.Drainer``. ``client``: the writer's, or another that reads the same."""

    def __init__(self, client: SlurmClient, writer: DrainWriter) -> None:
        self._client = client
        self._writer = writer

    def drain(self, node: str, check_id: str, evidence: str) -> Answer:
        """See Drainer. Raises SlurmError where Slurm does not answer, or will not."""
        outcome = self._writer.drain(node, Finding(check_id, evidence))
        if outcome.result not in _OUTCOMES:
            raise SlurmError(outcome.why)
        return Answer(_OUTCOMES[outcome.result], outcome.why)

    def room(self, node: str) -> str:
        """See Drainer."""
        return self._writer.room(node)

    def held(self, node: str) -> frozenset[str]:
        """See Drainer."""
        found = next(iter(self._client.nodes([node])), None)
        ours = read_reason(found.reason) if found is not None and found.state.drain else None
        return frozenset(finding.check for finding in ours or ())

    def undrain(self, node: str, check_id: str, passes: int) -> str:
        """See Drainer."""
        outcome = self._writer.undrain(node, check_id, passes)
        if outcome.result in ("unknown", "refused"):
            raise SlurmError(outcome.why)
        return "" if outcome.result == "nothing" else f"{outcome.result}: {check_id}: {outcome.why}"
