"""The storm breaker around one drain of a node: before it, right after it, and some minutes later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from resilio_hpc.slurm.client.client import SlurmClient
from resilio_hpc.slurm.client.model import Node
from resilio_hpc.slurm.drain.policy import DrainPolicy
from resilio_hpc.slurm.drain.reason import read_reason
from resilio_hpc.slurm.drain.storm_breaker import Storm, no_room, one_too_many

_LOOKS_BACK_S = 300.0  # after its drain, a node looks whether others that drained at the same moment were first


@dataclass(frozen=True)
class _Sight:
    """All nodes, and the order count on the outer side: before the nodes were read, or after."""

    count: int | None
    nodes: tuple[Node, ...]


class StormGuard:
    """The storm breaker for a drain of ``node`` for ``check``. Methods raise SlurmError."""

    def __init__(
        self, client: SlurmClient, policy: DrainPolicy, clock: Callable[[], float], node: str, check: str
    ) -> None:
        self._client = client
        self._policy = policy
        self._clock = clock
        self._node = node
        self._check = check
        self._before: _Sight | None = None  # of all nodes, before the drain

    def ahead(self) -> Storm | None:
        """Return why the node must not be drained now; None where there is room."""
        self._before = _Sight(self._client.node_updates(), self._client.nodes())
        return no_room(self._before.nodes, self._node, self._clock(), self._policy, self._check)

    def too_many(self) -> Storm | None:
        """Return why the drain that was just written is one too many; None where it is not."""
        return one_too_many(self._client.nodes(), self._node, self._clock(), self._policy, self._check)

    def came_too_late(self, drained: Node) -> Storm | None:
        """Return the storm if this package's drain of a few minutes ago was one too many.

        Nodes that drain in the same second do not see all others at once; later all see the same, and apply the same
        order.
        """
        if drained.reason_time is None:
            return None
        if len(read_reason(drained.reason) or ()) != 1:  # reworded since, so it is not known when it was drained
            return None
        return self.too_many() if abs(self._clock() - drained.reason_time) < _LOOKS_BACK_S else None

    def only_others_were_drained(self, own: int) -> bool:
        """Return whether drains of other nodes explain all orders since ``ahead``, except ``own`` to this node."""
        if self._before is None:
            return False
        nodes = self._client.nodes()
        return _only_drained_others(self._before, _Sight(self._client.node_updates(), nodes), self._node, own)


def _only_drained_others(before: _Sight, after: _Sight, target: str, own: int) -> bool:
    """Return whether each order in between shows in another node's drain, except ``own`` orders to ``target``.

    A drain of this package is an order to one node: so no other order was to ``target``.
    """
    if before.count is None or after.count is None:
        return False
    reasons = {node.name: node.reason for node in before.nodes}
    drained = [node for node in after.nodes if node.name != target and _ours_since(node, reasons)]
    return after.count - before.count - own == len(drained)


def _ours_since(node: Node, reasons: dict[str, str]) -> bool:
    return node.state.drain and node.reason != reasons.get(node.name, "") and read_reason(node.reason) is not None
