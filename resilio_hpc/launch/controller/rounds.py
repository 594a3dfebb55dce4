"""The controller's part for a round: it stops the old ranks and starts the new ones, until all of them end. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from resilio_hpc.core.tiers import Tier
from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.controller.checkpoints.checkpoint_phase import CheckpointPhase
from resilio_hpc.launch.controller.checkpoints.round_layouts import RoundLayouts
from resilio_hpc.launch.controller.facts.intents import (
    EndRun,
    EndStopped,
    Intend,
    LetLeaversGo,
    Recovered,
    RepeatStop,
    SlowStart,
    StartingRanks,
    TestSuspects,
)
from resilio_hpc.launch.controller.facts.outbox import Outbox
from resilio_hpc.launch.controller.facts.repeated_failure import again_reason
from resilio_hpc.launch.controller.facts.run_state import RunState
from resilio_hpc.launch.controller.facts.state import KnownAgent, Phase
from resilio_hpc.launch.protocol import messages as m

AGAIN_S = 1.0  # seconds after which an order without an answer is repeated: a broken connection may have lost it
AGAIN_PER_S = 1000  # agents per second: of thousands, each gets it less often
ANSWERS = (m.RanksStarted, m.FirstStep, m.RanksDone)


class Rounds:
    """Leads from ``preparing`` over ``starting`` to ``running``."""

    def __init__(self, run: RunState, out: Outbox, intend: Intend, checkpoints: CheckpointPhase) -> None:
        self._run = run
        self._out = out
        self._intend = intend
        self._checkpoints = checkpoints
        self._store_port: int | None = None
        self._last_step: m.LastStep = "none"
        self._may_have_ranks: set[str] = set()  # nodes that must have stopped theirs before the next round starts
        self._start: m.Start | None = None
        self._next_again = run.now()
        self._first_step_round = -1
        self._layouts = RoundLayouts(run, out)
        self._awaited: dict[type, set[str]] = {}  # answer type → members that have not given it in this round

    # -- preparing ---------------------------------------------------------------------------------------------

    def prepare(self, members: tuple[m.Member, ...]) -> None:
        """Begin a round: the nodes of ``members``, and those of the round before, stop their ranks."""
        run = self._run
        nodes = [member.node for member in members]
        before = [member.node for member in run.members] if run.has_prepared else run.agents
        self._may_have_ranks = {*self._may_have_ranks, *before, *nodes}
        run.has_prepared = True
        if run.members and run.config.test_replacements:
            run.in_doubt |= {node for node in nodes if not run.is_member(node)}
        size, lost = run.world_size, run.recovery is not None and run.recovery.loses_state
        run.set_members(members)
        self._last_step = "shared" if lost or run.world_size != size else "all"
        run.round += 1
        self._store_port = None
        run.enter(Phase.PREPARING)
        self._checkpoints.begin_round(nodes)
        run.voters_changed = True  # its number of ranks may differ
        for agent in run.agents.values():
            agent.forget_round()
        self._out.record("round", round=run.round, members=nodes, world_size=run.world_size)
        self._answers_due()
        for node in run.agents:
            self._send_prepare(node)

    def _send_prepare(self, node: str) -> None:
        run = self._run
        opens_store = node == run.members[0].node
        cause = run.recovery.cause(certain=True) if run.recovery is not None else None
        self._out.send(node, m.Prepare(run.epoch, run.round, opens_store, cause, self._last_step))

    def stopped(self, agent: KnownAgent, message: m.RanksStopped) -> None:
        """Take note that a node's old ranks are gone."""
        agent.held = message.held
        agent.known = message.known
        agent.echoes = message.echoes
        agent.stopped_round = max(agent.stopped_round, message.round)
        self.try_start()

    def store_ready(self, message: m.StoreOpened) -> None:
        """Take note that the rendezvous store is open."""
        run = self._run
        if run.phase is Phase.PREPARING and message.node == run.members[0].node:
            self._store_port = message.port
            self.try_start()

    def try_start(self) -> None:
        """Start the ranks when every member has stopped its old ones and the store is open."""
        run = self._run
        if run.phase is not Phase.PREPARING or self._store_port is None:
            return
        if not run.leads or not run.voters_known:
            return  # a quorum must store the voters and their addresses before any rank trains
        if not all(self._has_stopped(node) for node in self._may_have_ranks):
            return
        if self._start is None and run.absent_may_train:
            return
        repeated = run.recovery.repeated(run.broke_before) if run.recovery is not None else None
        if repeated is not None:
            self._end_repeated(repeated)
            return
        if run.in_doubt:
            self._intend(TestSuspects())
            return
        wanted, fetches = self._checkpoints.restore_plan()
        if not self._needs_run_directory(wanted, fetches) and not self._checkpoints.may_grow(wanted):
            self._start_ranks(self._store_port, wanted, fetches)

    def _end_repeated(self, failure: m.RankFailure) -> None:
        self._intend(EndRun("no_progress", 1, again_reason(failure), failure))

    def _start_ranks(self, port: int, wanted: m.RestorePoint | None, fetches: tuple[m.MissingSnapshot, ...]) -> None:
        run = self._run
        self._may_have_ranks.clear()
        acts = run.config.mode != Mode.OBSERVE
        restore = wanted if acts else None
        follows, run.last_life = run.last_life, (run.epoch, run.round)
        run.enter(Phase.STARTING)
        self._awaited = {kind: {x.node for x in run.members} for kind in ANSWERS}
        self._intend(StartingRanks())
        self._layouts.start(-1 if restore is None else restore.step)
        self._start = m.Start(
            run.epoch, run.round_state(), run.members[0].address, port, restore,
            follows, fetches if acts else (), self._disk_ports(restore, fetches), run.cause,
            run.collective_s, run.trace,
        )  # fmt: skip
        self._out.record(
            "start", round=run.round, restore=f"{wanted.source}:{wanted.step}" if wanted else "",
            **({"fetched": {fetch.rank: fetch.endpoint or "committed" for fetch in fetches}} if fetches else {}),
            **({} if acts else {"acted": False}), **({"trace": True} if run.trace else {}),
        )  # fmt: skip
        self._answers_due()
        self._out.broadcast(self._start)
        self._checkpoints.restored(restore)
        self._intend(LetLeaversGo())

    def _needs_run_directory(self, restore: m.RestorePoint | None, fetches: Sequence[m.MissingSnapshot]) -> bool:
        """Return whether to wait until the run directory refuses older epochs and has told their commits.

        It may hold a newer step than any agent knows, and a commit that hung with it may still come. Not needed where
        memory holds the newest step.
        """
        reads_it = restore is None or restore.source != "memory" or not all(fetch.endpoint for fetch in fetches)
        return not self._run.recorded and reads_it

    def _disk_ports(self, restore: m.RestorePoint | None, fetches: Sequence[m.MissingSnapshot]) -> tuple[int, ...]:
        """Return the members' disk ports, where a rank restores from files and a node serves its disk; else nothing."""
        run = self._run
        in_memory = restore is None or (restore.source is Tier.MEMORY and all(fetch.endpoint for fetch in fetches))
        ports = tuple(0 if in_memory else run.agents[x.node].hello.disk_port for x in run.members)
        return ports if any(ports) else ()

    def _has_stopped(self, node: str) -> bool:
        """Return whether no rank of an earlier round runs there. Ranks of a lost node ended with its lease."""
        agent = self._run.agents.get(node)
        if agent is None:
            return not self._run.is_member(node)
        return agent.stopped_round >= self._run.round

    def came(self, agent: KnownAgent, replaced: bool) -> None:
        """Repeat to an agent that said Hello what it may have missed.

        ``replaced``: it is a new process, so what the former one had opened is gone.
        """
        run, node = self._run, agent.hello.node
        if run.phase is Phase.PREPARING:
            self._may_have_ranks.add(node)
            if replaced and node == run.members[0].node:
                self._store_port = None
            if agent.stopped_round < run.round or node == run.members[0].node:
                self._send_prepare(node)
        elif run.with_ranks and self._start is not None:
            self._out.send(node, self._start)
            if run.is_member(node):
                self._checkpoints.order_again(node)
                self._intend(RepeatStop(node))

    # -- starting and running ----------------------------------------------------------------------------------

    def _others_awaited(self, message: m.RanksStarted | m.FirstStep | m.RanksDone) -> bool:
        """Return whether other members have not given this answer yet."""
        awaited = self._awaited.get(type(message), set())
        awaited.discard(message.node)
        return bool(awaited)

    def _all_members(self) -> list[KnownAgent] | None:
        """Return what is known of every member; None if one is not here."""
        agents = [self._run.agents.get(member.node) for member in self._run.members]
        known = [agent for agent in agents if agent is not None]
        return known if len(known) == len(agents) else None

    def started(self, agent: KnownAgent, message: m.RanksStarted) -> None:
        """Take note that a node's ranks run. A script that reports no steps gives no later sign."""
        run = self._run
        if not run.with_ranks or agent.started or not run.is_member(message.node):
            return
        agent.started = run.has_started = True
        self._out.record(
            "ranks_started", node=message.node, round=message.round, seconds=message.seconds, mode=message.mode
        )  # fmt: skip
        self._checkpoints.order_again(message.node)  # an order may have come to it before the round did
        if run.phase is Phase.RUNNING or self._others_awaited(message):
            return
        members = self._all_members()
        if not run.steps_reported and members and all(member.started for member in members):
            run.enter(Phase.RUNNING)
            if run.recovery is not None:
                run.recovery.runs_since = run.now()  # whether they train is seen later

    def first_step(self, agent: KnownAgent, message: m.FirstStep) -> None:
        """Take note of a node's first step. With the last node's, all ranks train again."""
        run = self._run
        if not run.with_ranks or self._first_step_round == run.round or not run.is_member(message.node):
            return
        agent.first_step = message
        agent.step = max(agent.step, message.step)
        run.steps_reported = True
        if self._others_awaited(message):
            return
        firsts = [member.first_step for member in self._all_members() or ()]
        seen = [first for first in firsts if first is not None]
        if len(seen) < len(run.members):
            return
        self._first_step_round = run.round
        run.enter(Phase.RUNNING)
        restored, step = run.goes_on_from(min(first.restored for first in seen)), min(first.step for first in seen)
        sources: Counter[str] = Counter()
        for tier, ranks in (one for first in seen for one in first.sources):
            sources[tier] += ranks
        used = [tier for tier in Tier if sources[tier]]
        self._out.record(
            "first_step", round=run.round, step=step, restored=restored, source=used[-1] if used else "",
            sources={tier: sources[tier] for tier in used}, restore_s=max(first.restore_s for first in seen),
        )  # fmt: skip
        self._intend(Recovered(max(first.time for first in seen), restored))

    def done(self, message: m.RanksDone) -> None:
        """Take note that all ranks of a node ended with 0. With the last node's, this job's part is complete."""
        if not self._others_awaited(message):
            self.end_when_saved()

    def end_when_saved(self) -> None:
        """End when all ranks ended with 0 and their last save is durable: a script need not wait for it."""
        run = self._run
        answers = [member.done for member in self._all_members() or ()]
        ended = [answer for answer in answers if answer is not None]
        if not run.with_ranks or not ended or len(ended) < len(run.members):
            return
        awaited = self._checkpoints.awaits(min(answer.snapshot for answer in ended))
        if awaited >= 0:
            self._out.record("last_save", step=awaited)
            return
        restored = self._start.restore if self._start is not None else None
        self._intend(Recovered(run.unix(), -1 if restored is None else restored.step))
        if any(answer.stopped for answer in ended):
            self._intend(EndStopped())
        else:
            self._intend(EndRun("completed", 0, "every rank exited with 0"))

    def watch(self) -> None:
        """Restart a round whose ranks are not started in time; then ``faults.hangs`` tells a hang from work."""
        run = self._run
        self.try_start()  # if it waited for a quorum
        self._say_again()
        if not run.recorded:
            return  # the run directory hangs, which is no failure of the nodes
        waited = run.now() - run.phase_began
        are_started = run.phase is Phase.STARTING and not self._awaited[m.RanksStarted]  # they may compile for long
        if waited > run.config.start_timeout_s and not are_started:
            self._out.record("slow_start", round=run.round, phase=run.phase, waited_s=round(waited, 3))
            self._intend(SlowStart())

    def _answers_due(self) -> None:
        self._next_again = self._run.now() + AGAIN_S + len(self._run.agents) / AGAIN_PER_S

    def _say_again(self) -> None:
        """Repeat the order to the agents that have not followed it, if they report at all."""
        run = self._run
        if run.now() < self._next_again:
            return
        self._answers_due()
        if run.phase is Phase.PREPARING:
            for node in sorted(self._may_have_ranks & run.agents.keys()):
                if not self._has_stopped(node) or (node == run.members[0].node and self._store_port is None):
                    self._send_prepare(node)
        elif run.phase is Phase.STARTING and self._start is not None:
            for node in sorted(self._awaited[m.RanksStarted] & run.agents.keys()):
                if run.agents[node].round != run.round:
                    self._out.send(node, self._start)
