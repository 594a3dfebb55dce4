"""Virtual time, and the faults that a test can order."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from resilio_hpc.core import rank_link
from resilio_hpc.launch.controller.controller import Controller
from resilio_hpc.launch.controller.facts.intents import PauseAndTest
from resilio_hpc.launch.controller.facts.rendezvous import NodeCounts
from resilio_hpc.launch.controller.facts.state import ControllerConfig
from resilio_hpc.launch.controller.lease_guard import LinkGuard
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.vote import VoteRecord
from resilio_hpc.launch.workers.local_rank import LocalRank
from tests.support.virtual_cluster.agent import VirtualAgent
from tests.support.virtual_cluster.directory import Directory, SharedStorage
from tests.support.virtual_cluster.invariants import Invariants, Violation
from tests.support.virtual_cluster.network import LATENCY_S, Network
from tests.support.virtual_cluster.rank_process import Behaviour
from tests.support.virtual_cluster.ranks import Life, Script, Snapshot, Training, life_of

TICK_S = 0.05
UNIX_0 = 1_700_000_000.0


@dataclass
class Site:
    """A node: what outlives its agent."""

    name: str
    cut: bool = False
    off: bool = False
    frozen: bool = False  # agent and ranks stand still
    stop_s: float = 0.02  # how long ranks take to die
    heeds_s: float = 0.0  # how long ranks that handle SIGTERM take to end by themselves
    clock: tuple[float, float] = (0.0, 1.0)  # the monotonic one: where it began, how fast it goes
    unix_offset_s: float = 0.0
    incarnations: int = 0
    calls: int = 0  # of all of them
    kept: m.RoundState | None = None
    vote_record: VoteRecord | None = None
    memory: dict[tuple[int, int], Snapshot] = field(default_factory=dict)  # (rank, step)
    memory_level: int = 0  # what its memory watch says
    pinned: int = -1  # the step that the saver reads

    def monotonic(self, now: float) -> float:
        """What the node's clock shows at the true time ``now``."""
        return self.clock[0] + self.clock[1] * now

    def take(self, copy: Snapshot, is_last: bool = False) -> None:
        """A new snapshot, in place of the older of two that the saver does not read. ``is_last``: beside them."""
        rank, step = copy.rank, copy.step
        self.memory[rank, step] = copy
        if is_last:
            return
        steps = sorted(s for r, s in self.memory if r == rank)
        for old in [s for s in steps if s not in (self.pinned, step)][: len(steps) - 2]:
            del self.memory[rank, old]


class World:
    """N nodes with an agent each. Tests order faults, then ``run`` until something holds."""

    def __init__(
        self, nodes: int = 4, spares: int = 0, slots: int = 2, script: Script | None = None, minimum: int | None = None,
        unit: int = 1, absent: tuple[str, ...] = (), disk_port: int = 0, **config: Any,
    ) -> None:  # fmt: skip
        names = tuple(f"n{number}" for number in range(1, nodes + spares + 1))
        shape = NodeCounts(minimum or nodes, nodes, unit)
        self.config = ControllerConfig(shape, names, **{"join_timeout_s": 30.0, **config})
        self.slots = slots
        self.script = script or Script()
        self.now = 1000.0
        self.directory = Directory()
        self.storage_fails = False
        self.bad_copies: set[m.RestorePoint] = set()
        self.saver_fails: set[tuple[str, int]] = set()  # (node, step)
        self.spawns = True
        self.copy_port = 0  # 1: with --partner-copies
        self.disk_port = disk_port  # with --local-checkpoints
        self.save_s, self.load_s = 0.2, 0.01
        self.failure_grace_s = 2.0
        self.slow_savers: dict[str, float] = {}  # node → seconds, instead of save_s
        self.probers_s, self.testing_s = 2.0, 3.0  # until probers are ready, and then until they have a result
        self.test_fails = ""  # why there is no result
        self.slow_nodes: set[str] = set()
        self.ports = 29500
        self.pids = 0
        self.sites = {name: Site(name) for name in names}
        self.watch = Invariants(self)
        self.network = Network(self)
        self.storage = SharedStorage(self)
        self._furnish()
        self.agents: dict[str, VirtualAgent] = {}
        self.trainings: dict[Life, Training] = {}
        self.ledger: list[tuple[float, str, dict[str, Any]]] = []
        self.starts: list[tuple[float, m.Start]] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self.events = 0
        for name in names:
            if name not in absent:
                self.start_agent(name)
        self._tick()

    def _furnish(self) -> None:
        """For worlds that are built otherwise."""

    # -- time --------------------------------------------------------------------------------------------------

    def unix(self) -> float:
        return UNIX_0 + self.now

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._sequence, call))

    def _tick(self) -> None:
        for agent in list(self.agents.values()):
            agent.tick()
        self.after(TICK_S, self._tick)

    def run(self, until: Callable[[], bool] | None = None, limit_s: float = 60.0) -> None:
        """Go on until something holds; without ``until`` for ``limit_s``."""
        end = self.now + limit_s
        while until is None or not until():
            if self._queue[0][0] > end:
                assert until is None, f"not reached in {limit_s} s; ledger: {self.ledger[-12:]}"
                self.now = end
                return
            self.now, _, call = heapq.heappop(self._queue)
            call()

    def on_message(self, agent: VirtualAgent, said: bool, message: Any) -> None:
        """An agent says something, or hears it."""
        (agent.said if said else agent.heard).append(message)

    def advance(self, until: float, most_events: int, deserted: bool = False) -> None:
        """Go on until then, or until every agent has left, unless ``deserted``. Endless time is a violation."""
        queue = self._queue
        while (self.agents or deserted) and queue and queue[0][0] <= until:
            self.now, _, call = heapq.heappop(queue)
            call()
            self.events += 1
            if self.events > most_events:
                raise Violation(f"endless: {self.events} events, {len(queue)} more wait")
        self.now = max(self.now, until) if self.agents or deserted else self.now

    def before_step(self) -> None:
        """Ranks are about to make a step."""

    # -- what the agents' virtual worlds share -----------------------------------------------------------------

    def record(self, kind: str, fields: dict[str, Any]) -> None:
        self.ledger.append((self.now, kind, fields))
        self.watch.recorded(kind, fields)

    def training(self, start: m.Start) -> Training:
        life = (start.state.epoch, start.state.round)
        if life not in self.trainings:
            self.trainings[life] = Training(self, start, self.script)
            if not any(start.master_port in agent.stores for agent in self.agents.values()):
                self.store_is_gone(self.trainings[life])
            self.starts.append((self.now, start))
            self.directory.last_round = max(self.directory.last_round, start.state.round)
        return self.trainings[life]

    def store_is_gone(self, training: Training) -> None:
        """Ranks start and cannot meet."""
        raise AssertionError("a store that is gone")

    # -- how ranks behave ----------------------------------------------------------------------------------------

    def leaves(self) -> Behaviour:
        """Draw how a rank leaves its round."""
        return Behaviour(0.05)

    def enters(self) -> Behaviour:
        """Draw how a rank enters the next round."""
        return Behaviour(0.05)

    def saves_last(self) -> Behaviour:
        """Draw how a rank saves the step that it finished last."""
        return Behaviour(0.02)

    def makes_s(self) -> float:
        """Draw how long it takes to make the snapshots of lost ranks."""
        return 0.01

    def has_come(self) -> bool:
        """Draw whether a partner's newest record has come."""
        return True

    def lost_steps(self, steps: int) -> None:
        """A round goes on; so many steps that a rank had finished are made again."""

    def breaks_at(self, training: Training, agent: VirtualAgent, rank: LocalRank) -> None:
        """A rank is inside of the step that breaks: in all of them before its collective."""

    def stands_still(self, nodes: Collection[str]) -> bool:
        """Whether a step that these nodes do together has to wait."""
        return any(self.sites[node].frozen for node in nodes)

    # -- faults ------------------------------------------------------------------------------------------------

    def start_agent(self, node: str) -> None:
        """The supervisor starts an agent."""
        self.sites[node].incarnations += 1
        self.agents[node] = VirtualAgent(self, self.sites[node])

    def kill_agent(self, node: str, silently: bool = False) -> None:
        """Its ranks go with it; unless ``silently`` (a node without power) peers see the connection close."""
        dead = self.agents.pop(node)
        dead.die()
        if not silently:
            self.network.closed(dead)

    def link_guard(self, agent: VirtualAgent, first: bool) -> LinkGuard:
        """What tells a controller whether its job still has the run: here, nothing."""
        return LinkGuard("", agent.monotonic(), first)

    def port(self, site: Site) -> int:
        """Where the node's next agent listens: all of a run use the same number, wherever it is free."""
        return 40_000

    def copy_s(self) -> float:
        """How long snapshots are on their way to another node."""
        return 0.1

    def reached(self, caller: str, node: str) -> VirtualAgent | None:
        """The agent of another node, if its replicator can be asked now."""
        agent = self.agents.get(node)
        there = agent is not None and agent.alive and not self.sites[node].frozen
        return agent if there and self.network.reaches(caller, node) and self.network.reaches(node, caller) else None

    def power_off(self, node: str) -> None:
        self.sites[node].off = True
        self.kill_agent(node, silently=True)

    def cut(self, node: str, cut: bool = True) -> None:
        """The node's network fails (its file system does not)."""
        self.sites[node].cut = cut

    def break_connection(self, node: str) -> None:
        """The connection to the controller breaks and comes again."""
        self.after(LATENCY_S, self.agents[node].lost_connection)

    def fail_rank(
        self,
        rank: int,
        exit_code: int | None = None,
        signal: int | None = 9,
        message: str = "",
        traceback: str = "",
    ) -> None:
        for agent in self.agents.values():
            local = agent.core.ranks.local
            for index, known in local.ranks.items() if local else ():
                if known.rank == rank and agent.rank_rounds():
                    agent.rank_ends(index, exit_code if signal is None else None, signal, message, traceback)
                    return
        raise AssertionError(f"rank {rank} does not run")

    def stop_rank(self, rank: int) -> None:
        """SIGSTOP: it lives, and makes no step."""
        self.life.stopped.add(rank)

    def test_nodes(self, replace: bool = False) -> None:
        """A user orders a test of the nodes."""
        for agent in list(self.agents.values()):
            agent.event(lambda host=agent.host: host.test_nodes(PauseAndTest("ordered", replace, "mark")))  # type: ignore[misc]

    def warn(self, signal: str) -> None:
        """A signal reaches every agent."""
        for agent in list(self.agents.values()):
            agent.core.warned(signal)

    # -- what tests look at ------------------------------------------------------------------------------------

    def records(self, kind: str) -> list[dict[str, Any]]:
        return [fields for _, name, fields in self.ledger if name == kind]

    def times(self, kind: str) -> list[float]:
        return [at for at, name, _ in self.ledger if name == kind]

    @property
    def last(self) -> m.Start:
        """The newest start of ranks."""
        return self.starts[-1][1]

    def members(self) -> list[str]:
        return [member.node for member in self.last.state.members]

    @property
    def step(self) -> int:
        return self.life.step if self.starts else 0

    @property
    def life(self) -> Training:
        """The newest one."""
        return self.trainings[self.last.state.epoch, self.last.state.round]

    def until_step(self, step: int) -> None:
        """The newest round completes ``step``."""
        self.run(lambda: self.step >= step)

    def until_round(self, number: int, limit_s: float = 60.0) -> None:
        """Round ``number``, or a later one, makes its first step."""
        self.run(lambda: any(f["round"] >= number for f in self.records("first_step")), limit_s)

    def until_over(self, limit_s: float = 200.0) -> dict[str, Any]:
        """Every agent has left, by itself. Returns the verdict."""
        self.run(lambda: not self.agents, limit_s)
        assert self.directory.verdict is not None
        return self.directory.verdict

    def controllers(self) -> Iterator[Controller]:
        return (agent.controller for agent in self.agents.values() if agent.controller is not None)

    @property
    def controller(self) -> Controller:
        (controller,) = self.controllers()
        return controller

    def tell_rank(self, agent: VirtualAgent, local_rank: int, message: rank_link.AgentMessage) -> None:
        local = agent.core.ranks.local
        training = self.trainings.get(life_of(local)) if local is not None else None
        if local is not None and isinstance(message, rank_link.LeaveRound | rank_link.SaveLastStep):
            agent.processes.tell(local, local_rank, message)
        elif training is not None:
            self.after(LATENCY_S, lambda: training.told(agent, local_rank, message))
