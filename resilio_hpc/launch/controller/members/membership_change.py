"""The controller's part for planned changes of membership: nodes that are added or removed. Pure."""

from __future__ import annotations

from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.controller.facts.intents import Intend, TryRound
from resilio_hpc.launch.controller.facts.outbox import Outbox
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.controller.facts.state import KnownAgent, Phase
from resilio_hpc.launch.protocol import messages as m

LEAVE_MARGIN_S = 10.0


class MembershipChange:
    """Changes the members right after a commit where it can wait, so that no step is lost."""

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
                # if it is the controller's own node, the others elect a new controller
                self._out.send(node, m.End(run.epoch, "left", 0))

    def _leavers(self) -> list[tuple[str, float]]:
        """Return the members that must leave, and when."""
        run = self._run
        if not self._has_leavers:
            return []
        known = [(x.node, run.agents[x.node]) for x in run.members if x.node in run.agents]
        return [(node, agent.leaves_at) for node, agent in known if agent.leaves_at is not None]

    def part_with_leavers(self) -> None:
        """Go on without the members that must leave: at the last moment, if no commit came before."""
        now = self._run.now()
        due = [node for node, at in self._leavers() if now > at - LEAVE_MARGIN_S]
        if due:
            self._change_members(f"{', '.join(due)} must leave")

    def committed(self) -> None:
        """Add or remove nodes right after a commit, which costs no step."""
        run = self._run
        if run.phase is not Phase.RUNNING or run.stopping or not run.leads:
            return
        parting = [node for node, _ in self._leavers()]
        unfit = self._unfit()
        if parting:
            self._change_members(f"{', '.join(parting)} must leave")
        elif unfit:
            self._change_members(f"{', '.join(unfit)} failed a test of the nodes")
        elif run.config.shape.trim(self._ready()) > len(run.members):
            self._change_members("more nodes are here")

    def part_with_unfit(self, at_once: bool) -> None:
        """Go on without members that a test found unfit, now or after the next commit."""
        unfit = self._unfit()
        if at_once and unfit and self._run.phase in (Phase.PREPARING, Phase.RUNNING):
            self._change_members(f"{', '.join(unfit)} failed a test of the nodes")

    def _unfit(self) -> list[str]:
        """Return the unfit members, where enough nodes are left without them."""
        run = self._run
        if not run.flagged:
            return []
        usable = set(run.usable)
        return [member.node for member in run.members if member.node in run.flagged and member.node not in usable]

    def _ready(self) -> int:
        """Return how many usable nodes could start ranks at once; training does not stop to wait for imports."""
        run = self._run
        return sum(run.agents[node].ready or run.is_member(node) for node in run.usable)

    def _change_members(self, reason: str) -> None:
        """Restart the ranks with other members, though none failed; no budget of restarts is used."""
        run = self._run
        if run.config.mode == Mode.RECOVER:
            self._out.record("regroup", reason=reason, round=run.round)
            run.enter(Phase.GATHERING)
            self._intend(TryRound())
