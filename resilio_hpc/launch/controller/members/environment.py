"""The controller's part for the nodes' environments: which of them cannot run ranks, and which differ. Pure."""

from __future__ import annotations

from resilio_hpc.launch.controller.facts.intents import Intend, NodeUnfit
from resilio_hpc.launch.controller.facts.outbox import Outbox
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.controller.facts.state import Phase
from resilio_hpc.launch.environment.compare import NodeDifference, differences
from resilio_hpc.launch.protocol import messages as m

SETTLES_S = 1.0  # after the last report, until the nodes are compared
MOST_NODES = 16  # that an event names


class Environments:
    """Takes the agents' reports."""

    def __init__(self, run: RunState, out: Outbox, intend: Intend) -> None:
        self._run = run
        self._out = out
        self._intend = intend
        self._facts: dict[str, dict[str, str]] = {}
        self._compare_at: float | None = None
        self._told: set[NodeDifference | tuple[str, str]] = set()

    def seen(self, message: m.EnvironmentSeen) -> None:
        """Take a report. A node that lacks what ranks need takes no part; once they run, a spare goes first."""
        run, node = self._run, message.node
        if message.facts:
            self._facts[node] = message.facts
            self._compare_at = run.now() + SETTLES_S
        for note in message.notes:
            if self._is_news(node, note):
                self._out.record("environment_short", node=node, reason=note)
        if not message.unfit:
            run.unfit.pop(node, None)
            return
        if self._is_news(node, message.unfit):
            self._out.record("node_unfit", node=node, reason=message.unfit)
        if not message.first or (run.phase is Phase.RUNNING and run.is_member(node)):
            run.suspects.add(node)
        elif node not in run.unfit:
            run.unfit[node] = message.unfit
            self._intend(NodeUnfit(node))

    def _is_news(self, node: str, reason: str) -> bool:
        news = (node, reason) not in self._told
        self._told.add((node, reason))
        return news

    def tick(self) -> None:
        """Compare the nodes once their reports are in."""
        if self._compare_at is None or self._run.now() < self._compare_at:
            return
        self._compare_at = None
        here = {node: facts for node, facts in self._facts.items() if node in self._run.agents}
        for one in differences(here):
            if one in self._told:
                continue
            self._told.add(one)
            self._out.record(
                "environment_differs", nodes=list(one.nodes[:MOST_NODES]), count=len(one.nodes), of=len(here),
                facts={name: [there, usual] for name, there, usual in one.facts},
            )  # fmt: skip
