"""Connections between agents. This one is perfect: in order, at once, or, where a node is cut off, not at all.

As with the real sockets, an agent has one outgoing connection, to the one that it follows, and answers come back on
it. Whoever answers needs to have been spoken to. A simulator with losses and delays replaces ``Network``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.virtual_cluster.agent import VirtualAgent
    from tests.support.virtual_cluster.world import World

LATENCY_S = 0.001


class Connection:
    """From an agent to the endpoint of another (or its own)."""

    def __init__(self, caller: VirtualAgent, endpoint: str) -> None:
        self.caller = caller
        self.name = caller.next_name()
        self.endpoint = endpoint
        self.node = endpoint.split(":")[0]

    @property
    def in_use(self) -> bool:
        """Whether the caller still listens to it."""
        return self.caller.alive and self.caller.connection is self


class Network:
    """Carries messages; ``deliver`` is called with them, or never."""

    def __init__(self, world: World) -> None:
        self._world = world

    def connect(self, caller: VirtualAgent, endpoint: str) -> Connection:
        """Open a connection; the one before is no longer used."""
        return Connection(caller, endpoint)

    def host(self, connection: Connection) -> VirtualAgent | None:
        """The process that listens at the other end."""
        agent = self._world.agents.get(connection.node)
        return agent if agent is not None and agent.endpoint == connection.endpoint else None

    def to_host(self, connection: Connection, deliver: Callable[[VirtualAgent], None]) -> None:
        """Carry a message from the caller."""

        def arrive() -> None:
            host = self.host(connection)
            if host is not None and self.reaches(connection.caller.node, connection.node):
                deliver(host)

        self._world.after(LATENCY_S, arrive)

    def to_caller(self, connection: Connection, deliver: Callable[[], None]) -> None:
        """Carry an answer back."""

        def arrive() -> None:
            if connection.in_use and self.reaches(connection.node, connection.caller.node):
                deliver()

        self._world.after(LATENCY_S, arrive)

    def reaches(self, sender: str, receiver: str) -> bool:
        """Whether a message passes at this moment."""
        sites = (self._world.sites[sender], self._world.sites[receiver])
        return sender == receiver or not any(site.cut or site.off for site in sites)

    def closed(self, agent: VirtualAgent, after_s: float = LATENCY_S) -> None:
        """A process is gone: those that were connected to it and can be reached see that."""
        for peer in self._world.agents.values():
            connection = peer.connection
            if connection is not None and connection.endpoint == agent.endpoint and self.reaches(agent.node, peer.node):
                self._world.after(after_s, peer.lost_connection)
