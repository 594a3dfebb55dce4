"""The controller's part for planned changes of the world: taking in more nodes, parting with some. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilio_hpc.launch.config.options import Mode
from resilio_hpc.launch.controller.state import Phase
from resilio_hpc.launch.protocol import messages as m

if TYPE_CHECKING:
    from resilio_hpc.launch.controller.controller import Controller
    from resilio_hpc.launch.controller.state import KnownAgent

LEAVE_MARGIN_S = 10.0


class Regrouping:
    """A change that can wait is made right after a commit, so that it costs no step."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._somebody_leaves = False

    def leaving(self, agent: KnownAgent, message: m.Leaving) -> None:
        """A joiner's own job ends soon."""
        controller = self._controller
        self._somebody_leaves = True
        if agent.leaves_at is None:
            agent.leaves_at = controller.now() + max(0.0, message.within_s)
            controller.record("leaving", node=message.node, within_s=round(message.within_s, 3))
            if not controller.is_member(message.node) and controller.phase is Phase.RUNNING:
                self.let_leavers_go()

    def let_leavers_go(self) -> None:
        """End the agents of nodes that leave and take no part any more."""
        controller = self._controller
        for node, agent in controller.agents.items():
            if agent.leaves_at is not None and not controller.is_member(node):
                controller.send(node, m.End(controller.epoch, "left", 0))  # if it is our own, others elect anew

    def _leavers(self) -> list[tuple[str, float]]:
        """Members that must go, and when."""
        controller = self._controller
        if not self._somebody_leaves:
            return []
        known = [(x.node, controller.agents[x.node]) for x in controller.members if x.node in controller.agents]
        return [(node, agent.leaves_at) for node, agent in known if agent.leaves_at is not None]

    def part_with_leavers(self) -> None:
        """At the last moment, if no commit made an earlier one better: go on without those that must go."""
        now = self._controller.now()
        due = [node for node, at in self._leavers() if now > at - LEAVE_MARGIN_S]
        if due:
            self._regroup(f"{', '.join(due)} must leave")

    def committed(self) -> None:
        """A step has just become durable: the best moment to take in nodes, or to part with some."""
        controller = self._controller
        if controller.phase is not Phase.RUNNING or controller.stop.terminating or not controller.enrolment.leads:
            return
        parting = [node for node, _ in self._leavers()]
        if parting:
            self._regroup(f"{', '.join(parting)} must leave")
        elif controller.config.shape.trim(self._ready()) > len(controller.members):
            self._regroup("more nodes are here")

    def _ready(self) -> int:
        """Usable nodes on which ranks would start at once; nobody stops training to wait for imports."""
        controller = self._controller
        return sum(controller.agents[x].ready or controller.is_member(x) for x in controller.rounds.usable())

    def _regroup(self, reason: str) -> None:
        """A restart that nobody's failure asks for: it counts against no budget."""
        controller = self._controller
        if controller.config.mode == Mode.RECOVER:
            controller.record("regroup", reason=reason, round=controller.round)
            controller.set_phase(Phase.GATHERING)
            controller.rounds.try_round()
