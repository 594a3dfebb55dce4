"""The controller: decides rounds, recovery, commits and stops. A pure state machine over messages.

It reads no clock but the one it is given, does no I/O, and returns actions; agents carry them out. All it knows is
soft state that agents send again when they (re)connect, so any agent can become the next controller.

Life of a round: ``gathering`` (who is in?) → ``preparing`` (old ranks stop, the store opens) → ``starting`` (ranks
run, first step not yet seen) → ``running``. A failure leads back to gathering with an open **incident**, which closes
with the first step that all ranks complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from resilio_hpc.launch import messages as m
from resilio_hpc.launch.commits import CommitTracker
from resilio_hpc.launch.first_failure import origin
from resilio_hpc.launch.recovery import Budgets, Failure, Plan, Rung, World, decide
from resilio_hpc.launch.rendezvous import Candidate, Shape, choose
from resilio_hpc.launch.stop_phase import StopPhase


@dataclass(frozen=True)
class ControllerConfig:
    """What the user asked for, as far as decisions need it. Times in seconds."""

    shape: Shape
    expected: tuple[str, ...]  # nodes of the allocation in their order
    heartbeat_timeout_s: float = 5.0
    join_timeout_s: float = 60.0
    start_timeout_s: float = 600.0
    max_without_progress: int = 3
    chained: bool = False
    stop_grace_s: float = 30.0
    end_time: float | None = None  # Unix seconds at which Slurm ends the job, where known
    save_margin_s: float = 10.0


@dataclass(frozen=True)
class Send:
    """Action: send to one agent."""

    node: str
    message: m.ToAgent


@dataclass(frozen=True)
class Record:
    """Action: write to the ledger."""

    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Finish:
    """Action: write the verdict durably, then send End to every agent."""

    verdict: str
    exit_code: int
    reason: str
    fields: dict[str, Any]


Action = Send | Record | Finish


@dataclass(frozen=True)
class Clock:
    """``monotonic`` for intervals and limits, ``unix`` for what is written down."""

    monotonic: Callable[[], float]
    unix: Callable[[], float]


@dataclass
class Agent:
    """What the controller knows of one node."""

    hello: m.Hello
    heard: float
    stopped_round: int = -1
    held: tuple[m.Held, ...] = ()
    first_step: m.FirstStep | None = None
    done: m.RanksDone | None = None
    started: bool = False
    step: int = -1
    step_time: float = 0.0


@dataclass
class Incident:
    """From the first sign of a failure to the first step of all ranks after it."""

    began: float  # Unix seconds
    at_step: int
    failures: list[m.RankFailure] = field(default_factory=list)
    lost_nodes: list[str] = field(default_factory=list)
    restarted_agents: list[str] = field(default_factory=list)
    new_controller: bool = False
    plan: Plan | None = None


class Controller:
    """See the module's text. ``handle`` takes a message, ``tick`` the passing of time; both return actions."""

    def __init__(self, config: ControllerConfig, epoch: int, node: str, clock: Clock) -> None:
        self.config = config
        self.epoch = epoch
        self.node = node
        self.phase = "gathering"
        self.round = -1
        self.members: tuple[m.Member, ...] = ()
        self.agents: dict[str, Agent] = {}
        self.lost: set[str] = set()
        self.left: set[str] = set()
        self.incident: Incident | None = None
        self.commits = CommitTracker()
        self.stop = StopPhase(self)
        self.restarts = 0
        self.without_progress = 0
        self.bad_copies: set[m.RestorePoint] = set()
        self._clock = clock
        self._began = clock.monotonic()
        self._phase_began = self._began
        self._store_port: int | None = None
        self._informed = False
        self._steps_reported = False
        self._waiting_said = False
        self._out: list[Action] = []

    # -- entry points ------------------------------------------------------------------------------------------

    def handle(self, message: m.ToController) -> list[Action]:
        """Take one message from an agent."""
        agent = self.agents.get(message.node)
        if isinstance(message, m.Hello):
            self._on_hello(message)
        elif agent is None:
            pass  # we have not been introduced: it will say Hello when its beats stay away
        else:
            agent.heard = self._clock.monotonic()
            if isinstance(message, m.Heartbeat):
                self._on_heartbeat(agent, message)
            elif message.epoch == self.epoch and self.phase != "ended":
                self._dispatch(agent, message)
        return self._flush()

    def tick(self) -> list[Action]:
        """Let time pass: lost nodes, slow starts, stops that are due."""
        if self.phase != "ended":
            self._find_lost_nodes()
            if self.phase == "gathering":
                self._try_round()
            elif self.phase in ("preparing", "starting"):
                self._watch_start()
            self.stop.tick(self._clock.monotonic(), self._clock.unix())
        return self._flush()

    def inform(self, committed: list[int], last_round: int) -> list[Action]:
        """What the run directory tells about the past: committed steps, and the last round's number."""
        self.commits.known |= set(committed)
        self._forget_bad_copies()
        self.round = max(self.round, last_round) if self.phase == "gathering" else self.round
        self._informed = True
        self.record("informed", committed=sorted(committed), last_round=last_round)
        if self.phase == "gathering":
            self._try_round()
        elif self.phase == "preparing":
            self._try_start()
        return self._flush()

    def warn(self, signal: str, node: str) -> list[Action]:
        """A warning that reached the controller's own side (the supervisor or Slurm's end time)."""
        self.stop.warned(signal, node)
        return self._flush()

    # -- messages ----------------------------------------------------------------------------------------------

    def _dispatch(self, agent: Agent, message: m.ToController) -> None:
        if isinstance(message, m.RanksStopped):
            self._on_stopped(agent, message)
        elif isinstance(message, m.StoreReady):
            if message.round == self.round and self.phase == "preparing":
                self._store_port = message.port
                self._try_start()
        elif isinstance(message, m.RanksStarted):
            self._on_started(agent, message)
        elif isinstance(message, m.RankFailed):
            self._on_rank_failed(message)
        elif isinstance(message, m.FirstStep):
            self._on_first_step(agent, message)
        elif isinstance(message, m.RanksDone):
            self._on_done(agent, message)
        elif isinstance(message, m.SnapshotWhole | m.Persisted | m.PersistFailed | m.Committed):
            self._on_checkpoint(message)
        elif isinstance(message, m.StopAnswer):
            if message.round == self.round:
                self.stop.answer(message)
        elif isinstance(message, m.Warned):
            self.stop.warned(message.signal, message.node)
        elif isinstance(message, m.Goodbye):
            self.agents.pop(message.node)
            self.left.add(message.node)
            self._node_gone(message.node, f"agent left: {message.reason}")

    def _on_hello(self, hello: m.Hello) -> None:
        known = self.agents.get(hello.node)
        agent = Agent(hello, self._clock.monotonic(), held=hello.held)
        if known is not None and known.hello.incarnation == hello.incarnation:
            agent = known  # it only lost the connection
            agent.heard = self._clock.monotonic()
        self.agents[hello.node] = agent
        self.send(hello.node, m.Welcome(self.epoch, self.node, self.peers()))
        if agent is known:
            return
        self.record("agent_joined", node=hello.node, incarnation=hello.incarnation, address=hello.address)
        self._adopt(hello)
        if known is not None and self._is_member(hello.node) and self.phase in ("starting", "running"):
            self._open_incident(restarted_agent=hello.node)
        elif self.phase == "preparing" and self._is_member(hello.node):
            self._send_prepare(hello.node)
        elif self.phase == "gathering":
            self._try_round()

    def _adopt(self, hello: m.Hello) -> None:
        """Take over the soft state of an earlier controller from the agent that has the newest."""
        self.commits.known |= set(hello.committed)
        last = hello.last
        if last is None or self.phase not in ("gathering",) or last.round <= self.round:
            return
        self.round = last.round
        self.members = last.members
        self._informed = True
        self.restarts = last.restarts + 1  # what follows is a restart of the ranks
        self.without_progress = last.without_progress + 1
        self.lost |= set(last.lost)
        self.bad_copies |= set(last.bad_copies)
        self.commits.known |= set(last.committed)
        self._forget_bad_copies()
        if self.members and self.incident is None:
            self.incident = Incident(self._clock.unix(), -1, new_controller=True)

    def _on_heartbeat(self, agent: Agent, beat: m.Heartbeat) -> None:
        if beat.incarnation != agent.hello.incarnation:
            return
        if beat.round == self.round:
            agent.step = max(agent.step, beat.step)
            agent.step_time = beat.step_time
        self.send(beat.node, m.Beat(self.epoch, beat.sent, self.peers()))

    def _on_stopped(self, agent: Agent, message: m.RanksStopped) -> None:
        agent.held = message.held
        agent.stopped_round = max(agent.stopped_round, message.round)
        if self.phase == "preparing":
            self._try_start()

    def _on_rank_failed(self, message: m.RankFailed) -> None:
        failure = message.failure
        self.record("rank_failed", round=message.round, **{k: getattr(failure, k) for k in failure.__struct_fields__})
        if failure.kind == "restore_failed":
            source, _, step = failure.message.partition(":")[0].partition(" ")
            self.bad_copies.add(m.RestorePoint(source, int(step)))
            self._forget_bad_copies()
        if self.incident is not None and message.round <= self.round and self.phase != "running":
            self.incident.failures.append(failure)
            if message.round == self.round and self.phase == "starting":
                self._begin_gathering()
        elif message.round == self.round and self.phase in ("starting", "running"):
            self._open_incident(failure=failure)

    def _on_started(self, agent: Agent, message: m.RanksStarted) -> None:
        if message.round != self.round or self.phase != "starting":
            return
        agent.started = True
        self.record("ranks_started", node=message.node, round=message.round, seconds=message.seconds, mode=message.mode)
        members = [self.agents.get(member.node) for member in self.members]
        if not self._steps_reported and all(member is not None and member.started for member in members):
            self._set_phase("running")  # a script that reports no steps: that its ranks run is all we shall know
            self._close_incident(self._clock.unix(), -1)

    def _on_first_step(self, agent: Agent, message: m.FirstStep) -> None:
        if message.round != self.round or self.phase not in ("starting", "running"):
            return
        agent.first_step = message
        self._steps_reported = True
        firsts = [self.agents[x.node].first_step for x in self.members if x.node in self.agents]
        if None in firsts or len(firsts) < len(self.members):
            return
        self._set_phase("running")
        at = max(first.time for first in firsts if first is not None)
        step = min(first.step for first in firsts if first is not None)
        self.record("first_step", round=self.round, step=step, restored=message.restored, source=message.source)
        self._close_incident(at, message.restored)

    def _on_done(self, agent: Agent, message: m.RanksDone) -> None:
        if message.round != self.round or self.phase not in ("starting", "running"):
            return
        agent.done = message
        answers = [self.agents[x.node].done for x in self.members if x.node in self.agents]
        if None in answers or len(answers) < len(self.members):
            return
        if self.incident is not None:
            self._close_incident(self._clock.unix(), -1)
        if any(answer.stopped for answer in answers if answer is not None) or self.stop.terminating:
            self.stop.ended()
        else:
            self.finish("completed", 0, "every rank exited with 0")

    def _on_checkpoint(self, message: m.SnapshotWhole | m.Persisted | m.PersistFailed | m.Committed) -> None:
        following: int | None = None
        if isinstance(message, m.SnapshotWhole):
            if message.round == self.round:
                self.bad_copies.discard(m.RestorePoint("memory", message.step))
                self.stop.saw_snapshot(message.step, self._clock.monotonic())
                following = self.commits.snapshot_whole(message.node, message.step)
        elif isinstance(message, m.Persisted):
            records = self.commits.persisted(message.node, message.step, message.record)
            if records and message.round == self.round:
                world = self.world_size
                self.send(self.members[0].node, m.Commit(self.epoch, self.round, message.step, world, records))
        elif isinstance(message, m.PersistFailed):
            self.record("persist_failed", node=message.node, step=message.step, error=message.error)
            self._broadcast(m.StageReached(self.epoch, message.step, "failed", message.error))
            following = self.commits.abandon(message.step)
        else:
            following = self.commits.commit(message.step)
            self.bad_copies.discard(m.RestorePoint("committed", message.step))
            self.without_progress = 0
            self.stop.saw_commit(message.step, self._clock.monotonic())
            self.record("committed", step=message.step, seconds=message.seconds, epoch=self.epoch)
            self._broadcast(m.StageReached(self.epoch, message.step, "committed"))
        if following is not None:
            for member in self.members:
                self.send(member.node, m.Persist(self.epoch, self.round, following))

    # -- failures ----------------------------------------------------------------------------------------------

    def _find_lost_nodes(self) -> None:
        limit = self._clock.monotonic() - self.config.heartbeat_timeout_s
        for node, agent in list(self.agents.items()):
            if agent.heard < limit:
                del self.agents[node]
                self.lost.add(node)
                self.record("node_lost", node=node, silent_s=round(self._clock.monotonic() - agent.heard, 3))
                self._node_gone(node, "no heartbeat")
        if self.phase == "gathering" and self._began < limit:
            for member in self.members:  # members of an earlier epoch that never came to us
                if member.node not in self.agents and member.node not in self.lost:
                    self.lost.add(member.node)
                    self.record("node_lost", node=member.node, silent_s=round(self._clock.monotonic() - self._began, 3))
                    self._node_gone(member.node, "did not come to the new controller")

    def _node_gone(self, node: str, why: str) -> None:
        if not self._is_member(node):
            return
        if self.phase in ("starting", "running"):
            self._open_incident(lost_node=node)
        else:
            if self.incident is not None:
                self.incident.lost_nodes.append(node)
            if self.phase == "preparing":
                self._begin_gathering()

    def _open_incident(
        self, failure: m.RankFailure | None = None, lost_node: str | None = None, restarted_agent: str | None = None
    ) -> None:
        step = max((agent.step for agent in self.agents.values()), default=-1)
        if self.incident is None:
            self.incident = Incident(failure.time if failure else self._clock.unix(), step)
        incident = self.incident
        incident.failures += [failure] if failure else []
        incident.lost_nodes += [lost_node] if lost_node else []
        incident.restarted_agents += [restarted_agent] if restarted_agent else []
        self._begin_gathering()

    def _begin_gathering(self) -> None:
        self._set_phase("gathering")
        self._waiting_said = False
        if self.stop.terminating:
            self.stop.ended()
            return
        self.restarts += 1
        self.without_progress += 1
        self._try_round()

    def _close_incident(self, recovered_at: float, restored: int) -> None:
        incident, self.incident = self.incident, None
        if incident is None:
            return
        first = origin(incident.failures)
        kind, node = self._classify(incident, first)
        lost = max(0, incident.at_step - max(restored, 0)) if incident.at_step >= 0 else None
        self.record(
            "recovered", kind=kind, node=node, round=self.round, recovery_s=round(recovered_at - incident.began, 4),
            lost_steps=lost, at=recovered_at, plan=incident.plan.rung.value if incident.plan else "", restored=restored,
            rank=first.rank if first else None,
        )  # fmt: skip

    def _classify(self, incident: Incident, first: m.RankFailure | None) -> tuple[str, str]:
        if incident.lost_nodes:
            return "node_lost", incident.lost_nodes[0]
        if incident.restarted_agents:
            return "agent_lost", incident.restarted_agents[0]
        if incident.new_controller:
            return "controller_lost", ""
        if first is None:
            return "slow_start", ""
        return {"signal": "rank_killed", "exit": "rank_exception"}.get(first.kind, first.kind), first.node

    # -- rounds ------------------------------------------------------------------------------------------------

    def _try_round(self) -> None:
        """Start preparing the next round if the nodes that it needs are in."""
        if self.stop.terminating:
            self.stop.ended()
            return
        if not self._informed:
            return
        usable = [node for node in self.agents if node not in self.lost]
        now = self._clock.monotonic()
        coming = 0
        if now - self._began < self.config.join_timeout_s or self.incident is not None:
            absent = [n for n in self.config.expected if n not in self.agents and n not in self.lost | self.left]
            if now - self._began >= self.config.join_timeout_s:
                absent = [n for n in absent if self._is_member(n)]
            coming = len(absent)
        if self.members:
            previous = len(self.members)
            world = World(previous, len(usable), coming, self.config.shape)
            lost = tuple(self.incident.lost_nodes) if self.incident else ()
            plan = decide(
                Failure(lost), world,
                Budgets(self.without_progress, self.config.max_without_progress, self.config.chained),
            )  # fmt: skip
            if not self._carry_out(plan):
                return
        elif coming == 0 and not self.config.shape.trim(len(usable)):
            self.finish("not_enough_nodes", 1, f"{len(usable)} node(s) joined within --join-timeout, "
                        f"{self.config.shape.minimum} needed")  # fmt: skip
            return
        candidates = [self._candidate(node) for node in usable]
        members = choose(candidates, [x.node for x in self.members], self.config.shape, coming)
        if members:
            self._prepare(tuple(members))

    def _carry_out(self, plan: Plan) -> bool:
        """Act on a plan; True when a round is to be prepared."""
        if self.incident is not None and plan != self.incident.plan:
            self.incident.plan = plan
            self.record("decision", rung=plan.rung.value, reason=plan.reason, round=self.round,
                        without_progress=self.without_progress)  # fmt: skip
        if plan.rung is Rung.STOP:
            spent = self.without_progress > self.config.max_without_progress
            first = origin(self.incident.failures) if self.incident else None
            self.finish("no_progress" if spent else "not_enough_nodes", 1, plan.reason, first)
        elif plan.rung is Rung.NEXT_JOB:
            self.finish("needs_new_job", 75, plan.reason)
        return plan.rung in (Rung.RESTART, Rung.REPLACE, Rung.SHRINK)

    def _candidate(self, node: str) -> Candidate:
        hello = self.agents[node].hello
        order = self.config.expected.index(node) if node in self.config.expected else len(self.config.expected)
        return Candidate(node, order, hello.address, hello.local_world_size, hello.topology)

    def _prepare(self, members: tuple[m.Member, ...]) -> None:
        self.members = members
        self.round += 1
        self._store_port = None
        self._set_phase("preparing")
        self.commits.begin([x.node for x in members])
        for agent in self.agents.values():
            agent.first_step = agent.done = None
            agent.started = False
            agent.step = -1
        self.record("round", round=self.round, members=[x.node for x in members], world_size=self.world_size)
        for node in self.agents:
            self._send_prepare(node)

    def _send_prepare(self, node: str) -> None:
        self.send(node, m.Prepare(self.epoch, self.round, node == self.members[0].node))

    def _try_start(self) -> None:
        """Start the ranks when every member has stopped its old ones and the store is open."""
        if self._store_port is None or not self._informed:
            return
        for member in self.members:
            agent = self.agents.get(member.node)
            if agent is None or agent.stopped_round < self.round:
                return
        restore = self._restore_point()
        state = self.state()
        self._set_phase("starting")
        for node in self.agents:
            self.send(node, m.Start(self.epoch, state, self.members[0].address, self._store_port, restore))
        self.record("start", round=self.round, restore=f"{restore.source}:{restore.step}" if restore else "")
        if restore is not None and restore.source == "memory":  # make durable what is only in memory
            for member in self.members:
                following = self.commits.snapshot_whole(member.node, restore.step)
                if following is not None:
                    for other in self.members:
                        self.send(other.node, m.Persist(self.epoch, self.round, following))

    def _restore_point(self) -> m.RestorePoint | None:
        """The newest step that every rank can restore: from its own node's memory, else from the shared directory."""
        steps: set[int] | None = None
        for member in self.members:
            ranks = range(member.first_rank, member.first_rank + member.local_world_size)
            held = [h for h in self.agents[member.node].held if h.world_size == self.world_size]
            for rank in ranks:
                mine = {h.step for h in held if h.rank == rank}
                steps = mine if steps is None else steps & mine
        in_memory = max((s for s in steps or () if m.RestorePoint("memory", s) not in self.bad_copies), default=-1)
        committed = self.commits.committed
        if committed < 0 and in_memory < 0:
            return None
        if in_memory >= committed:
            return m.RestorePoint("memory", in_memory)
        return m.RestorePoint("committed", committed)

    def _forget_bad_copies(self) -> None:
        self.commits.known -= {copy.step for copy in self.bad_copies if copy.source == "committed"}

    def _watch_start(self) -> None:
        """A round that does not come up in time is tried again (a hung rendezvous must not hold an allocation)."""
        if self.phase == "starting" and not self._steps_reported:
            return  # a script that reports no steps: only its own time-outs can tell
        waited = self._clock.monotonic() - self._phase_began
        if waited > self.config.start_timeout_s:
            self.record("slow_start", round=self.round, phase=self.phase, waited_s=round(waited, 3))
            self._open_incident()

    # -- small things ------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Ranks in the current round."""
        return sum(member.local_world_size for member in self.members)

    @property
    def max_step(self) -> int:
        """The furthest step known."""
        return max((agent.step for agent in self.agents.values()), default=-1)

    def peers(self) -> tuple[tuple[str, str], ...]:
        """Agents in the order in which they take over."""
        ranks = {member.node: member.node_rank for member in self.members}
        nodes = sorted(self.agents, key=lambda n: (ranks.get(n, len(ranks)), n))
        return tuple((node, self.agents[node].hello.endpoint) for node in nodes)

    def state(self) -> m.RoundState:
        """The soft state that agents keep for the next controller."""
        return m.RoundState(
            self.epoch, self.round, self.members, self.restarts, self.without_progress,
            tuple(sorted(self.commits.known)), tuple(sorted(self.lost)), tuple(self.bad_copies),
        )  # fmt: skip

    def finish(self, verdict: str, exit_code: int, reason: str, failure: m.RankFailure | None = None) -> None:
        """End the run, or this job's part of it."""
        if self.phase == "ended":
            return
        self._set_phase("ended")
        fields: dict[str, Any] = {
            "round": self.round, "restarts": self.restarts, "committed": self.commits.committed, "epoch": self.epoch,
        }  # fmt: skip
        if failure is not None:
            fields["first_failure"] = {k: getattr(failure, k) for k in failure.__struct_fields__}
        self._out.append(Finish(verdict, exit_code, reason, fields))

    def send(self, node: str, message: m.ToAgent) -> None:
        """Queue a message."""
        self._out.append(Send(node, message))

    def record(self, kind: str, /, **fields: Any) -> None:
        """Queue a ledger entry."""
        self._out.append(Record(kind, fields))

    def _broadcast(self, message: m.ToAgent) -> None:
        for node in self.agents:
            self.send(node, message)

    def _is_member(self, node: str) -> bool:
        return any(member.node == node for member in self.members)

    def _set_phase(self, phase: str) -> None:
        self.phase = phase
        self._phase_began = self._clock.monotonic()

    def _flush(self) -> list[Action]:
        out, self._out = self._out, []
        return out
