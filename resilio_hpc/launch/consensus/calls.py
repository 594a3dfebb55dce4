"""Which voter an agent without a controller calls, and when it calls again. Pure."""

from __future__ import annotations

from resilio_hpc.launch.consensus.state import ElectionState
from resilio_hpc.launch.consensus.succession_ports import SuccessionPorts
from resilio_hpc.launch.protocol import messages as m

CALL_S = 0.1  # between two calls to the node that is contacted
CALLS_PER_S = 5000  # of all callers together, since one candidate gets them
TURN_S = 1.0  # how long the next candidate may take to answer
PATIENCE_S = 3.0  # how long a candidate that answers may take to win


class Calls:
    """The calls of one node, in the order of succession. ``node``: the one that it is connected to, "" for none."""

    def __init__(self, state: ElectionState, ports: SuccessionPorts) -> None:
        self.node = ""
        self._state = state
        self._ports = ports
        self._turn = 0
        self._avoid = ""  # contacted last, since it was lost
        self._next = self._next_refusal = self._contacted_at = self._called_at = self._answered_at = ports.monotonic()

    def hang_up(self) -> None:
        """Call no more: there is a controller."""
        self.node = ""

    def start_over(self) -> None:
        """Call no node now, and the first in line next."""
        self.node = ""
        self._turn = 0

    def begin(self, avoid: str, now: float) -> None:
        """Begin at once, since the controller was lost. ``avoid``: its node, which may be gone."""
        self.start_over()
        self._avoid = avoid
        self._next = now

    def due(self, now: float) -> bool:
        """Return whether to go on, and count that as done."""
        if now < self._next:
            return False
        self._next = now + max(CALL_S, len(self._state.membership.voters.nodes) / CALLS_PER_S)
        return True

    def answered(self, now: float) -> None:
        """Take note that the node which is contacted, or followed, has answered."""
        self._answered_at = now

    def further(self, now: float) -> None:
        """Call the node that is contacted again, or, when it had its time, the next one."""
        if self.node:
            answered = self._answered_at > self._contacted_at or self.node == self._state.node
            if now - self._contacted_at < (PATIENCE_S if answered else TURN_S) + self._state.crowd_s:
                heard = self._answered_at >= self._called_at  # else it is busy with other calls
                if self.node != self._state.node and (heard or now - self._called_at >= self._state.repeat_s):
                    self.call(now)
                return
        candidates = self._candidates()
        if self.node == candidates[self._turn % len(candidates)]:
            self._turn += 1  # otherwise another node was contacted meanwhile
        for step in range(len(candidates)):
            node = candidates[(self._turn + step) % len(candidates)]
            endpoint = self._state.membership.endpoint(node)
            if node == self._state.node or endpoint:
                self._turn += step
                self.address(node, endpoint, now)
                return

    def _candidates(self) -> list[str]:
        """Return the voters in the order of succession. The controller that was lost comes last: it may come back."""
        nodes = [node for node in self._state.membership.voters.nodes if node != self._avoid]
        return [*nodes, self._avoid] if self._avoid in self._state.membership.voters.nodes else nodes

    def address(self, node: str, endpoint: str, now: float) -> None:
        """Connect to a node and call it; this node itself is only waited for."""
        self.node, self._contacted_at = node, now
        if node != self._state.node:
            self._ports.contact(node, endpoint)
            self.call(now)

    def refuse(self, now: float) -> None:
        """Call the node that asked for a vote which it does not get: it learns why from what this node knows."""
        if now >= self._next_refusal:  # at a bounded rate: two candidates would call without end
            self._next_refusal = now + CALL_S
            self.call(now)

    def call(self, now: float) -> None:
        """Tell the node that is contacted that this one has no controller."""
        self._called_at = now
        state = self._state
        self._ports.to_controller(m.NoLeader(state.node, state.newest, state.membership, state.silent_s(now)))
