"""A network of bad days, as TCP shows it to ZeroMQ, and somewhat worse.

A connection delivers in order, after delays. What meets a cut is held and comes late, when the cut is healed, unless
the connection breaks: then what was on its way is lost, the caller hears of it and connects anew. In a **bad** phase
messages are also lost, doubled and overtake each other; a connection that lost something breaks in the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from tests.support.virtual_cluster.network import Connection, Network

if TYPE_CHECKING:
    from tests.support.simulator.world import SeededWorld
    from tests.support.virtual_cluster.agent import VirtualAgent

RETRY_S = 0.3
DELAYED_S = 0.1  # longer than on any good day
Held = tuple[bool, Callable[..., None]]  # (to the host, deliver)


@dataclass(frozen=True)
class Bad:
    """Shares of messages, and the longest delay."""

    lost: float = 0.0
    doubled: float = 0.0
    overtaking: bool = False
    delay_s: float = 0.0


FINE = Bad()


class SeededConnection(Connection):
    """``life`` counts how often it was set up."""

    def __init__(self, caller: VirtualAgent, endpoint: str) -> None:
        super().__init__(caller, endpoint)
        self.open = False
        self.peer: VirtualAgent | None = None  # the process that it was set up with; another may listen there later
        self.life = 0
        self.lossy = False
        self.last = [0.0, 0.0]  # newest arrival back, forth
        self.unsent: list[Callable[..., None]] = []
        self.held: list[Held] = []


class SeededNetwork(Network):
    """``cuts``: ordered pairs of nodes between which nothing passes."""

    def __init__(self, world: SeededWorld, draw: Random) -> None:
        super().__init__(world)
        self.cuts: set[tuple[str, str]] = set()
        self.bad = FINE
        self._seeded = world
        self._random = draw.random
        self._connections: list[SeededConnection] = []

    def reaches(self, sender: str, receiver: str) -> bool:
        """Whether a message passes at this moment."""
        if sender == receiver:
            return True
        sites = self._seeded.sites
        return not (sites[sender].off or sites[receiver].off) and (sender, receiver) not in self.cuts

    def _both_ways(self, connection: Connection) -> bool:
        one, other = connection.caller.node, connection.node
        return self.reaches(one, other) and self.reaches(other, one)

    # -- connections -------------------------------------------------------------------------------------------

    def connect(self, caller: VirtualAgent, endpoint: str) -> Connection:
        connection = SeededConnection(caller, endpoint)
        self._connections = [known for known in self._connections if known.in_use or known.held]
        self._connections.append(connection)
        self._seeded.after(0.001 + 0.01 * self._random(), partial(self._set_up, connection))
        return connection

    def _set_up(self, connection: SeededConnection) -> None:
        if connection.open or not connection.in_use:
            return
        if self.host(connection) is None or not self._both_ways(connection):
            self._seeded.after(RETRY_S, partial(self._set_up, connection))
            return
        connection.open = True
        connection.peer = self.host(connection)
        unsent, connection.unsent = connection.unsent, []
        for deliver in unsent:
            self._send(connection, True, deliver)

    def break_connection(self, connection: Connection | None) -> None:
        """What is on its way is lost; the caller hears of it."""
        if isinstance(connection, SeededConnection) and connection.open:
            connection.life += 1
            connection.open = connection.lossy = False
            connection.held.clear()
            if connection.in_use:
                self._seeded.after(0.001, partial(self._tell_lost, connection))
                self._seeded.after(0.05 + 0.3 * self._random(), partial(self._set_up, connection))

    def _tell_lost(self, connection: SeededConnection) -> None:
        if connection.in_use:
            connection.caller.lost_connection()

    def closed(self, agent: VirtualAgent, after_s: float = 0.0) -> None:
        """A process is gone; its last words arrive before the news."""
        for connection in list(self._connections):
            if connection.endpoint == agent.endpoint:
                delay = max(0.0, connection.last[0] - self._seeded.now) + 0.01 * self._random()
                self._seeded.after(delay, partial(self._end_seen, connection))

    def _end_seen(self, connection: SeededConnection) -> None:
        if self._is_dead(connection) and self.reaches(connection.node, connection.caller.node):
            self.break_connection(connection)

    def _is_dead(self, connection: SeededConnection) -> bool:
        host = self.host(connection)
        return host is None or (connection.peer is not None and host is not connection.peer)

    # -- messages ----------------------------------------------------------------------------------------------

    def to_host(self, connection: Connection, deliver: Callable[[VirtualAgent], None]) -> None:
        assert isinstance(connection, SeededConnection)
        if connection.open:
            self._send(connection, True, deliver)
        else:
            connection.unsent.append(deliver)

    def to_caller(self, connection: Connection, deliver: Callable[[], None]) -> None:
        assert isinstance(connection, SeededConnection)
        if connection.open:
            self._send(connection, False, deliver)

    def _send(self, connection: SeededConnection, forth: bool, deliver: Callable[..., None]) -> None:
        bad, random = self.bad, self._random
        if connection.node == connection.caller.node:
            bad = FINE  # it does not leave the node
        if bad.lost and random() < bad.lost:
            connection.lossy = True
            self._seeded.felt["lost"] += 1
            return
        self._push(connection, forth, deliver, bad)
        if bad.doubled and random() < bad.doubled:
            self._seeded.felt["doubled"] += 1
            self._push(connection, forth, deliver, bad)

    def _push(self, connection: SeededConnection, forth: bool, deliver: Callable[..., None], bad: Bad) -> None:
        random, now = self._random, self._seeded.now
        at = now + 0.0005 + 0.01 * random() * random() + bad.delay_s * random()
        if at < connection.last[forth]:
            if bad.overtaking:
                self._seeded.felt["overtook"] += 1
            else:
                at = connection.last[forth]
        connection.last[forth] = max(at, connection.last[forth])
        if at > now + DELAYED_S:
            self._seeded.felt["delayed"] += 1
        self._seeded.after(at - now, partial(self._arrive, connection, connection.life, forth, deliver))

    def _arrive(self, connection: SeededConnection, life: int, forth: bool, deliver: Callable[..., None]) -> None:
        if connection.life != life:
            return
        one, other = connection.caller.node, connection.node
        passes = self.reaches(one, other) if forth else self.reaches(other, one)
        if not passes or any(held[0] == forth for held in connection.held):
            connection.held.append((forth, deliver))
            self._seeded.felt["held"] += 1
        elif forth:
            host = self.host(connection)
            if host is None or self._is_dead(connection):
                self.break_connection(connection)
            else:
                deliver(host)
        elif connection.in_use:
            deliver()

    # -- cuts --------------------------------------------------------------------------------------------------

    def heal(self, cuts: set[tuple[str, str]]) -> None:
        """These pairs are no longer cut: what was held comes, or the connection has broken meanwhile."""
        self.cuts -= cuts
        for connection in list(self._connections):
            if not self._both_ways(connection):
                continue
            if self._is_dead(connection) or (connection.held and self._random() < 0.3):
                self.break_connection(connection)
            elif connection.held:
                self._seeded.after(self._random(), partial(self._release, connection, connection.life))

    def _release(self, connection: SeededConnection, life: int) -> None:
        held, connection.held = connection.held, []
        for forth, deliver in held:
            self._arrive(connection, life, forth, deliver)

    def better(self) -> None:
        """A bad phase is over: what lost something has broken."""
        self.bad = FINE
        for connection in list(self._connections):
            if connection.lossy:
                self.break_connection(connection)
