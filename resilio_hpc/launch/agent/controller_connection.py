"""An agent's connection to the controller that it follows, or to a candidate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import zmq

from resilio_hpc.core import wire
from resilio_hpc.core.errors import WireError
from resilio_hpc.launch.consensus.connections import Names
from resilio_hpc.launch.protocol import messages as m


class ControllerConnection:
    """One connection at a time. Each has an identity of its own, so a controller can tell it from earlier ones."""

    def __init__(self, context: zmq.Context[Any], keys: wire.Keys, counters: wire.Counters, node: str) -> None:
        self._context = context
        self._keys = keys
        self._counters = counters
        self._names = Names(node)
        self._caller: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """Return the sockets to poll."""
        return tuple(each for each in (self._caller, self._monitor) if each is not None)

    def connect(self, endpoint: str) -> None:
        """Connect to ``endpoint`` in place of the former one."""
        self.close()
        self._caller = wire.call(self._context, self._keys, endpoint, self._names.next())
        self._monitor = self._caller.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def send(self, message: m.ToController) -> None:
        """Queue a message; without a connection it is dropped."""
        if self._caller is not None:
            wire.send(self._caller, [m.to_controller.encode(message)])

    def received(self) -> Iterator[m.ToAgent]:
        """Yield the messages that have come, until the connection changes."""
        caller = self._caller
        for frames in wire.receive_all(caller) if caller is not None else ():
            try:
                message = m.to_agent.decode(frames[-1])
            except WireError:
                self._counters.dropped += 1
                continue
            yield message
            if self._caller is not caller:
                return  # the connection was closed by the last message

    def is_lost(self) -> bool:
        """Return whether the other end has closed the connection since the last call."""
        if self._monitor is None:
            return False
        events = [int.from_bytes(frames[0][:2], "little") for frames in wire.receive_all(self._monitor)]
        return zmq.EVENT_DISCONNECTED in events

    def close(self) -> None:
        """Close the connection."""
        if self._caller is not None:
            self._caller.disable_monitor()
            self._caller.close(0)
            self._caller = self._monitor = None
