"""The controller's part for planned changes of the world: taking in more nodes, parting with some. Pure."""

from __future__ import annotations

from resilio_hpc.launch.config.options import Mode
from resilio_hpc.launch.controller.intents import Intend, TryRound
from resilio_hpc.launch.controller.outbox import Outbox
from resilio_hpc.launch.controller.run_state import RunState
from resilio_hpc.launch.controller.state import KnownAgent, Phase
from resilio_hpc.launch.protocol import messages as m

LEAVE_MARGIN_S = 10.0


class MembershipChange:
    """A change that can wait is made right after a commit, so that it costs no step."""

    def __init__(self, run: RunState, out: Outbox, intend: Intend) -> None:
        self._run = run
        self._out = out
        self._intend = intend
        self._has_leavers = False

    def leaving(self, agent: KnownAgent, message: m.Leaving) -> None:
        """Take note that a joiner's own job ends soon."""
        run = self._run
        self._has_leavers = True
        if agent.leaves_at is None:
            agent.leaves_at = run.now() + max(0.0, message.within_s)
            self._out.record("leaving", node=message.node, within_s=round(message.within_s, 3))
            if not run.is_member(message.node) and run.phase is Phase.RUNNING:
                self.let_leavers_go()

    def let_leavers_go(self) -> None:
        """End the agents of nodes that leave and take no part any more."""
        run = self._run
        for node, agent in run.agents.items():
            if agent.leaves_at is not None and not run.is_member(node):
                self._out.send(node, m.End(run.epoch, "left", 0))  # if it is our own, others elect anew

    def _leavers(self) -> list[tuple[str, float]]:
        """Return the members that must go, and when."""
        run = self._run
        if not self._has_leavers:
            return []
        known = [(x.node, run.agents[x.node]) for x in run.members if x.node in run.agents]
        return [(node, agent.leaves_at) for node, agent in known if agent.leaves_at is not None]

    def part_with_leavers(self) -> None:
        """Go on without those that must go: at the last moment, if no commit made an earlier one better."""
        now = self._run.now()
        due = [node for node, at in self._leavers() if now > at - LEAVE_MARGIN_S]
        if due:
            self._change_members(f"{', '.join(due)} must leave")

    def committed(self) -> None:
        """Take in nodes, or part with some: a step has just become durable, which is the best moment."""
        run = self._run
        if run.phase is not Phase.RUNNING or run.stopping or not run.leads:
            return
        parting = [node for node, _ in self._leavers()]
        if parting:
            self._change_members(f"{', '.join(parting)} must leave")
        elif run.config.shape.trim(self._ready()) > len(run.members):
            self._change_members("more nodes are here")

    def _ready(self) -> int:
        """Usable nodes on which ranks would start at once; training does not stop to wait for imports."""
        run = self._run
        return sum(run.agents[node].ready or run.is_member(node) for node in run.usable)

    def _change_members(self, reason: str) -> None:
        """Restart the ranks though nothing failed: it counts against no budget."""
        run = self._run
        if run.config.mode == Mode.RECOVER:
            self._out.record("regroup", reason=reason, round=run.round)
            run.enter(Phase.GATHERING)
            self._intend(TryRound())
