"""The queue of actions that the controller's parts fill and the controller returns."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from resilio_hpc.launch.controller.facts.state import Action, Record, Send
from resilio_hpc.launch.protocol import messages as m


class Outbox:
    """Actions, in the order of the decisions."""

    def __init__(self, nodes: Collection[str]) -> None:
        """Take ``nodes``, a live view of the nodes with an agent."""
        self._nodes = nodes
        self._actions: list[Action] = []

    def act(self, action: Action) -> None:
        """Queue an action."""
        self._actions.append(action)

    def send(self, node: str, message: m.ToAgent) -> None:
        """Queue a message."""
        self._actions.append(Send(node, message))

    def broadcast(self, message: m.ToAgent) -> None:
        """Queue a message to every agent."""
        for node in self._nodes:
            self.send(node, message)

    def record(self, kind: str, /, **fields: Any) -> None:
        """Queue a ledger entry."""
        self._actions.append(Record(kind, fields))

    def take(self) -> list[Action]:
        """Return the actions and empty the queue."""
        actions, self._actions = self._actions, []
        return actions
