"""The controller's part for nodes whose memory is nearly full: said once, of many nodes together. Pure.

Each agent watches its own node (``metrics/memory_watch``) and has recorded the details; its Heartbeats carry the level.
"""

from __future__ import annotations

from resilio_hpc.launch.controller.facts.outbox import Outbox
from resilio_hpc.launch.controller.facts.run_state import RunState

LOOK_S = 1.0
QUIET_S = 60.0  # after one alert, those of other nodes are gathered
MOST_NAMES = 8


class MemoryAlerts:
    """Tells of levels that rose since the last alert."""

    def __init__(self, run: RunState, out: Outbox) -> None:
        self._run = run
        self._out = out
        self._told: dict[str, int] = {}  # node → level
        self._next_look = float("-inf")
        self._quiet_until = float("-inf")

    def tick(self) -> None:
        """Look at the agents' levels when it is due."""
        now, agents = self._run.now(), self._run.agents
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        for node in [node for node in self._told if node not in agents or not agents[node].memory_level]:
            del self._told[node]
        risen = [node for node, agent in agents.items() if agent.memory_level > self._told.get(node, 0)]
        if not risen or now < self._quiet_until:
            return
        self._quiet_until = now + QUIET_S
        risen.sort(key=lambda node: (-agents[node].memory_level, node))
        self._told |= {node: agents[node].memory_level for node in risen}
        worst = agents[risen[0]]
        self._out.record(
            "memory_alert", level=worst.memory_level, node=risen[0], text=worst.memory, count=len(risen),
            nodes=risen[:MOST_NAMES],
        )  # fmt: skip
