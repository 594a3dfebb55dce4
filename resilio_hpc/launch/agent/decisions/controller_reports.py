"""What an agent reports to its controller of a round, and says again to the next controller. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from resilio_hpc.launch.agent.decisions.agent_ports import Ports
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.local_round import LocalRound

FACTS: dict[type, str] = {  # what the controller must not miss of a round: the newest message of each name is repeated
    m.RanksStarted: "started", m.FirstStep: "first step", m.RanksDone: "done", m.RankFailed: "failed",
    m.SnapshotWhole: "snapshot", m.StepPersisted: "file", m.PersistFailed: "file", m.ManifestWritten: "manifest",
}  # fmt: skip


class ControllerReports:
    """The reports of one node. ``epoch``: that of the controller which gets them."""

    def __init__(self, node: str, ports: Ports) -> None:
        self.node = node
        self.epoch = 0
        self._ports = ports
        self._facts: dict[tuple[str, int], m.ToController] = {}
        self._of_node: dict[type, m.OfNode] = {}

    def tell(self, message: m.ToController) -> None:
        """Send to the controller; send again if the connection breaks."""
        name = FACTS.get(type(message))
        if name is not None:
            self._facts[name, message.failure.local_rank if isinstance(message, m.RankFailed) else 0] = message
        self._ports.to_controller(message)

    def tell_all(self, messages: Iterable[m.ToController]) -> None:
        """Send these to the controller, in this order."""
        for message in messages:
            self.tell(message)

    def failure(self, round_number: int, failure: m.RankFailure) -> m.RankFailed:
        """Return the report of a failure."""
        return m.RankFailed(self.node, self.epoch, round_number, failure)

    def node_failure(
        self, local: LocalRound | None, prepared: int, what: tuple[str, str], at: float, local_rank: int = 0,
        bad: m.RestorePoint | None = None,
    ) -> m.RankFailed:  # fmt: skip
        """Return a failure that no rank caused, of the round that runs here or is being prepared.

        ``what``: its kind and text; ``bad``: the copy that could not be restored.
        """
        kind, text = what
        number = local.number if local else prepared
        rank = local.ranks[local_rank].rank if local and local_rank in local.ranks else 0
        return self.failure(number, m.RankFailure(self.node, rank, local_rank, kind, at, None, None, text, "", bad))

    def repeat(self) -> None:
        """Send the facts of this round again: the controller may have missed them."""
        for fact in self._facts.values():
            self._ports.to_controller(fact)
        for report in self._of_node.values():
            self._send_of_node(report)

    def tell_of_node(self, report: m.OfNode) -> None:
        """Send what this node is like, and send it again to each later controller."""
        self._of_node[type(report)] = report
        self._send_of_node(report)

    def _send_of_node(self, report: m.OfNode) -> None:
        if self.epoch > 0:
            self._ports.to_controller(msgspec.structs.replace(report, epoch=self.epoch))

    def clear(self) -> None:
        """Forget the facts: another round or another controller begins."""
        self._facts.clear()
