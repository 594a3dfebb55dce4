"""The controller's part for rounds: who takes part, stopping the old ranks, starting the new ones. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, assert_never

from resilio_hpc.ckpt.coordination.coordinator import TIERS
from resilio_hpc.launch.config.options import Mode
from resilio_hpc.launch.controller.recovery_policy import Budgets, Failure, Plan, Rung, World, decide
from resilio_hpc.launch.controller.rendezvous import Candidate, choose, whole_first
from resilio_hpc.launch.controller.state import MAX_LOSSES, WITH_RANKS, KnownAgent, Phase
from resilio_hpc.launch.protocol import messages as m

if TYPE_CHECKING:
    from resilio_hpc.launch.controller.controller import Controller

WAITING_SAID_AFTER_S = 10.0
RETURN_S = 20.0  # before a run gives up for want of nodes, one that was just lost may come back
AGAIN_S = 1.0  # an order without an answer is said again: it may be lost with a connection
AGAIN_PER_S = 1000  # agents: thousands are told less often
ANSWERS = (m.RanksStarted, m.FirstStep, m.RanksDone)


class Rounds:
    """Leads from ``gathering`` over ``preparing`` and ``starting`` to ``running``."""

    def __init__(self, controller: Controller) -> None:
        self.last_life = m.NO_LIFE  # of those whose ranks were started, in this epoch or an earlier one
        self.has_prepared = False  # a round in this epoch: what earlier epochs left is of no interest any more
        self.has_started = False  # the ranks of a whole node, in this epoch
        self.attached = False  # a rank uses resilio_hpc.train, in this epoch: its steps will be reported
        self.steps_reported = False  # a step of this run was reported, in this epoch or an earlier one
        self._controller = controller
        self._join_until = controller.now() + controller.config.join_timeout_s
        self._store_port: int | None = None
        self._may_have_ranks: set[str] = set()  # nodes that must have stopped theirs before the next round starts
        self._start: m.Start | None = None
        self._next_again = controller.now()
        self._first_step_round = -1
        self._waiting_said = False
        self._order = {node: order for order, node in enumerate(controller.config.expected)}
        self._awaited: dict[type, set[str]] = {}  # by kind of answer: members that have not given it in this round

    def adopt(self, state: m.RoundState) -> None:
        """Go on after an earlier controller. Who was with it may still come: until then nobody gives up or shrinks."""
        self.last_life = max(self.last_life, state.life)
        self.steps_reported = self.steps_reported or state.steps_reported
        self._controller.incidents.adopt(state.broken_by)
        self._join_until = self._controller.now() + self._controller.config.heartbeat_timeout_s

    # -- gathering ---------------------------------------------------------------------------------------------

    def try_round(self) -> None:
        """Prepare the next round if the nodes that it needs are in, or carry out what else is decided."""
        controller = self._controller
        if controller.phase is not Phase.GATHERING:
            return
        if controller.stop.terminating:
            controller.stop.ended()
            return
        if not controller.may_prepare or not controller.enrolment.leads:
            return
        usable = self.usable()
        coming = self._coming()
        shape = controller.config.shape
        if controller.members:
            if not self._carry_out(self._plan(len(usable), coming)):
                return
            coming = 0  # the plan has weighed them
        elif coming == 0 and not shape.trim(len(usable)):
            reason = f"{len(usable)} node(s) joined within --join-timeout, {shape.minimum} needed"
            controller.ending.finish("not_enough_nodes", 1, reason)
            return
        if coming:
            self._say_waiting(len(usable))
        if shape.trim(len(usable)) < max(1, shape.trim(len(usable) + coming)):
            return  # as ``choose`` would say, at length
        candidates = whole_first([self._candidate(node) for node in usable], shape)
        members = choose(candidates, [member.node for member in controller.members], shape, coming)
        if members:
            self._prepare(tuple(members))

    def usable(self) -> list[str]:
        """Nodes that could take part in a round: they stay, and have devices for a rank."""
        agents, lost = self._controller.agents, self._controller.lost
        there = [node for node, agent in agents.items() if node not in lost and agent.leaves_at is None]
        return [node for node in there if agents[node].hello.local_world_size]

    def _say_waiting(self, usable: int) -> None:
        """Nobody should wonder why nothing happens: after a while, say which nodes have not come."""
        controller = self._controller
        if self._waiting_said or controller.now() - controller.began < WAITING_SAID_AFTER_S:
            return
        self._waiting_said = True
        gone = controller.agents.keys() | controller.lost | controller.left
        absent = [node for node in controller.config.expected if node not in gone]
        until = round(max(0.0, self._join_until - controller.now()))
        controller.record("waiting", have=usable, want=controller.config.shape.minimum, absent=absent, up_to_s=until)

    def _coming(self) -> int:
        """Nodes that may still appear: members whose agent restarts, and all others while the join window is open."""
        controller = self._controller
        gone = controller.agents.keys() | controller.lost | controller.left
        absent = [node for node in controller.config.expected if node not in gone]
        if controller.now() >= self._join_until:
            absent = [node for node in absent if controller.incidents.current and controller.is_member(node)]
        return len(absent)

    def _plan(self, usable: int, coming: int) -> Plan:
        controller = self._controller
        incident = controller.incidents.current
        gone = controller.agents.keys() | controller.lost | controller.left
        returning = sum(member.node not in gone for member in controller.members)
        return decide(
            Failure(tuple(incident.lost_nodes) if incident else ()),
            World(len(controller.members), usable, coming, controller.config.shape, returning, self._just_lost()),
            Budgets(controller.without_progress, controller.config.max_without_progress, controller.config.chained),
        )

    def _just_lost(self) -> int:
        controller = self._controller
        incident = controller.incidents.current
        if incident is None or controller.now() - incident.opened > RETURN_S:
            return 0
        return sum(x in controller.lost and controller.losses.get(x, 0) <= MAX_LOSSES for x in incident.lost_nodes)

    def _carry_out(self, plan: Plan) -> bool:
        """Act on a plan; True when a round is to be prepared."""
        controller = self._controller
        controller.incidents.planned(plan)
        if controller.config.mode != Mode.RECOVER and plan.rung is not Rung.WAIT:
            controller.ending.finish_unrecovered(plan)
            return False
        match plan.rung:
            case Rung.RESTART | Rung.REPLACE | Rung.SHRINK:
                return True
            case Rung.WAIT:
                return False
            case Rung.NEXT_JOB:
                controller.ending.finish("needs_new_job", 75, plan.reason)
            case Rung.STOP:
                controller.ending.give_up(plan)
            case _:
                assert_never(plan.rung)
        return False

    def _candidate(self, node: str) -> Candidate:
        hello = self._controller.agents[node].hello
        order = self._order.get(node, len(self._order))
        return Candidate(node, order, hello.address, hello.local_world_size, hello.topology, hello.evicted)

    # -- preparing ---------------------------------------------------------------------------------------------

    def _prepare(self, members: tuple[m.Member, ...]) -> None:
        controller = self._controller
        nodes = [member.node for member in members]
        before = [member.node for member in controller.members] if self.has_prepared else controller.agents
        self._may_have_ranks = {*self._may_have_ranks, *before, *nodes}
        self.has_prepared = True
        controller.members = members
        controller.round += 1
        self._store_port = None
        controller.set_phase(Phase.PREPARING)
        controller.checkpoints.begin_round(nodes)
        controller.enrolment.changed = True  # ranks may differ
        for agent in controller.agents.values():
            agent.forget_round()
        controller.record("round", round=controller.round, members=nodes, world_size=controller.world_size)
        self._answers_due()
        for node in controller.agents:
            self._send_prepare(node)

    def _send_prepare(self, node: str) -> None:
        controller = self._controller
        opens_store = node == controller.members[0].node
        controller.send(node, m.Prepare(controller.epoch, controller.round, opens_store))

    def stopped(self, agent: KnownAgent, message: m.RanksStopped) -> None:
        """A node's old ranks are gone."""
        agent.held = message.held
        agent.known = message.known
        agent.stopped_round = max(agent.stopped_round, message.round)
        self._controller.incidents.reached(message.completed)
        self.try_start()

    def store_ready(self, message: m.StoreReady) -> None:
        """The rendezvous store is open."""
        controller = self._controller
        if controller.phase is Phase.PREPARING and message.node == controller.members[0].node:
            self._store_port = message.port
            self.try_start()

    def try_start(self) -> None:
        """Start the ranks when every member has stopped its old ones and the store is open."""
        controller = self._controller
        if controller.phase is not Phase.PREPARING or self._store_port is None:
            return
        if not controller.enrolment.leads or not controller.enrolment.known:
            return  # before anybody trains, a quorum knows who votes, and where to find the others
        if not all(self._has_stopped(node) for node in self._may_have_ranks):
            return
        if self._start is None and controller.incidents.absent_may_train():
            return
        if controller.incidents.ends_the_run():
            return
        wanted, fetches = controller.checkpoints.restore_plan()
        if self._needs_run_directory(wanted, fetches) or controller.checkpoints.may_grow(wanted):
            return
        self._may_have_ranks.clear()
        acts = controller.config.mode != Mode.OBSERVE
        restore = wanted if acts else None
        follows, self.last_life = self.last_life, (controller.epoch, controller.round)
        controller.set_phase(Phase.STARTING)
        self._awaited = {kind: {x.node for x in controller.members} for kind in ANSWERS}
        controller.incidents.restarts()
        self._start = m.Start(
            controller.epoch, controller.state(), controller.members[0].address, self._store_port, restore,
            follows, fetches if acts else (), self._disk_ports(restore, fetches),
        )  # fmt: skip
        controller.record(
            "start", round=controller.round, restore=f"{wanted.source}:{wanted.step}" if wanted else "",
            **({"fetched": {fetch.rank: fetch.endpoint or "committed" for fetch in fetches}} if fetches else {}),
            **({} if acts else {"acted": False}),
        )  # fmt: skip
        self._answers_due()
        controller.broadcast(self._start)
        controller.checkpoints.restored(restore)
        controller.regrouping.let_leavers_go()

    def _needs_run_directory(self, restore: m.RestorePoint | None, fetches: Sequence[m.Fetch]) -> bool:
        """Whether to wait until it refuses commits of older epochs and has told what those came to.

        It may hold a newer step than any agent has heard of, and a commit that hung with it may yet come. Memory is as
        new as any of them.
        """
        reads_it = restore is None or restore.source != "memory" or not all(fetch.endpoint for fetch in fetches)
        return not self._controller.tenure.recorded and reads_it

    def _disk_ports(self, restore: m.RestorePoint | None, fetches: Sequence[m.Fetch]) -> tuple[int, ...]:
        """Of the members, where any rank restores from files and any node has a disk that others may read."""
        controller = self._controller
        in_memory = restore is None or (restore.source == "memory" and all(fetch.endpoint for fetch in fetches))
        ports = tuple(0 if in_memory else controller.agents[x.node].hello.disk_port for x in controller.members)
        return ports if any(ports) else ()

    def _has_stopped(self, node: str) -> bool:
        """Whether no rank of an earlier round lives there. Those of a node that is lost ended with its lease."""
        agent = self._controller.agents.get(node)
        if agent is None:
            return not self._controller.is_member(node)
        return agent.stopped_round >= self._controller.round

    # -- nodes that come again ---------------------------------------------------------------------------------

    def came(self, node: str, agent: KnownAgent, replaced: bool) -> None:
        """An agent said Hello, perhaps not for the first time: tell it again what it may have missed.

        ``replaced``: it is a new process in the place of an earlier one, so what that one had opened is gone.
        """
        controller = self._controller
        if controller.phase is Phase.GATHERING:
            if not self._more_must_come():
                self.try_round()
        elif controller.phase is Phase.PREPARING:
            self._may_have_ranks.add(node)
            if replaced and node == controller.members[0].node:
                self._store_port = None
            if agent.stopped_round < controller.round or node == controller.members[0].node:
                self._send_prepare(node)
        elif controller.phase in WITH_RANKS and self._start is not None:
            controller.send(node, self._start)
            if controller.is_member(node):
                controller.checkpoints.order_again(node)
                controller.stop.connection_renewed(node)

    # -- starting and running ----------------------------------------------------------------------------------

    def _more_must_come(self) -> bool:
        """Whether a count tells that it is of no use to look at everybody again. What it overlooks, ``tick`` finds."""
        controller = self._controller
        known = len(controller.agents) + len(controller.lost) + len(controller.left)
        return known < len(controller.members or controller.config.expected) and controller.now() < self._join_until

    def _others_awaited(self, message: m.RanksStarted | m.FirstStep | m.RanksDone) -> bool:
        """Whether some member has not given this answer yet."""
        awaited = self._awaited.get(type(message), set())
        awaited.discard(message.node)
        return bool(awaited)

    def _all_members(self) -> list[KnownAgent] | None:
        """What is known of every member; None while one is missing."""
        agents = [self._controller.agents.get(member.node) for member in self._controller.members]
        known = [agent for agent in agents if agent is not None]
        return known if len(known) == len(agents) else None

    def started(self, agent: KnownAgent, message: m.RanksStarted) -> None:
        """A node's ranks run. For a script that tells of no steps that is all we shall ever know."""
        controller = self._controller
        if controller.phase not in WITH_RANKS or agent.started:
            return
        agent.started = self.has_started = True
        controller.record(
            "ranks_started", node=message.node, round=message.round, seconds=message.seconds, mode=message.mode
        )  # fmt: skip
        controller.checkpoints.order_again(message.node)  # an order may have come before the round did
        if controller.phase is Phase.RUNNING or self._others_awaited(message):
            return
        members = self._all_members()
        if not self.steps_reported and members and all(member.started for member in members):
            controller.set_phase(Phase.RUNNING)
            controller.incidents.runs_again()

    def first_step(self, agent: KnownAgent, message: m.FirstStep) -> None:
        """All ranks of a node completed their first step: with the last node's, the run is training again."""
        controller = self._controller
        if controller.phase not in WITH_RANKS or self._first_step_round == controller.round:
            return
        agent.first_step = message
        agent.step = max(agent.step, message.step)
        self.steps_reported = True
        if self._others_awaited(message):
            return
        firsts = [member.first_step for member in self._all_members() or ()]
        seen = [first for first in firsts if first is not None]
        if len(seen) < len(controller.members):
            return
        self._first_step_round = controller.round
        controller.set_phase(Phase.RUNNING)
        restored, step = min(first.restored for first in seen), min(first.step for first in seen)
        sources: Counter[str] = Counter()
        for tier, ranks in (one for first in seen for one in first.sources):
            sources[tier] += ranks
        used = [tier for tier in TIERS if sources[tier]]
        controller.record(
            "first_step", round=controller.round, step=step, restored=restored, source=used[-1] if used else "",
            sources={tier: sources[tier] for tier in used}, restore_s=max(first.restore_s for first in seen),
        )  # fmt: skip
        controller.incidents.close(max(first.time for first in seen), restored)

    def done(self, agent: KnownAgent, message: m.RanksDone) -> None:
        """All ranks of a node ended as they should: with the last node's, this job's part is over."""
        controller = self._controller
        if controller.phase not in WITH_RANKS:
            return
        agent.done = message
        controller.stop.member_done(message)
        controller.incidents.member_done(message)
        if not self._others_awaited(message):
            self.end_when_saved()

    def end_when_saved(self) -> None:
        """All ranks have ended as they should, and what they saved last is durable: a script need not wait for that."""
        controller = self._controller
        answers = [member.done for member in self._all_members() or ()]
        ended = [answer for answer in answers if answer is not None]
        if controller.phase not in WITH_RANKS or not ended or len(ended) < len(controller.members):
            return
        awaited = controller.checkpoints.awaits(min(answer.snapshot for answer in ended))
        if awaited >= 0:
            controller.record("last_save", step=awaited)
            return
        restored = self._start.restore if self._start is not None else None
        controller.incidents.close(controller.unix(), -1 if restored is None else restored.step)
        if any(answer.stopped for answer in ended):
            controller.stop.ended()
        else:
            controller.ending.finish("completed", 0, "every rank exited with 0")

    def watch(self) -> None:
        """A round that does not come up in time is tried again (a hung rendezvous must not hold an allocation)."""
        controller = self._controller
        self.try_start()  # if it waited for a quorum
        self._say_again()
        if not controller.tenure.recorded:
            return  # the run directory hangs: nobody's fault
        waited = controller.now() - controller.phase_began
        if waited > controller.config.start_timeout_s:
            controller.record("slow_start", round=controller.round, phase=controller.phase, waited_s=round(waited, 3))
            controller.incidents.slow_start()

    def _answers_due(self) -> None:
        self._next_again = self._controller.now() + AGAIN_S + len(self._controller.agents) / AGAIN_PER_S

    def _say_again(self) -> None:
        """Repeat the order to those who have not followed it, as far as they tell."""
        controller = self._controller
        if controller.now() < self._next_again:
            return
        self._answers_due()
        if controller.phase is Phase.PREPARING:
            for node in sorted(self._may_have_ranks & controller.agents.keys()):
                if not self._has_stopped(node) or (node == controller.members[0].node and self._store_port is None):
                    self._send_prepare(node)
        elif controller.phase is Phase.STARTING and self._start is not None:
            for node in sorted(self._awaited[m.RanksStarted] & controller.agents.keys()):
                if controller.agents[node].round != controller.round:
                    controller.send(node, self._start)
