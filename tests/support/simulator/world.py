"""A virtual cluster in which nothing is quite in time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from random import Random
from typing import Any

from resilio_hpc.launch.controller.lease_guard import LinkGuard
from resilio_hpc.launch.workers.local_rank import LocalRank
from tests.support.simulator.links import Chain, VirtualGuard
from tests.support.simulator.network import SeededNetwork
from tests.support.simulator.schedule import Schedule
from tests.support.simulator.storage import SeededStorage
from tests.support.virtual_cluster.agent import VirtualAgent
from tests.support.virtual_cluster.invariants import Violation
from tests.support.virtual_cluster.rank_process import Behaviour
from tests.support.virtual_cluster.ranks import Training
from tests.support.virtual_cluster.world import Site, World

LEAVES_S = (0.05, 0.3, 0.3, 2.0, 7.0)  # how long ranks take to leave a round
FATES = 0.15  # share of ranks that do not do what they are asked, or not to the end
ECHOES = 0.2  # share of the ranks of a broken round that raise an error of their library, as gloo does
AROUND = 0.4  # share of failures in which some ranks of a node have finished a step more than others
DRIFT = 0.02  # clocks go wrong by up to so much

STOPS_S = (0.02, 0.05, 0.25)  # how long ranks take to die
HEEDS_S = (0.0, 0.0, 0.0, 0.5, 3.0)  # how long those that handle SIGTERM take to end by themselves
RENDEZVOUS_S = 5.0
TAKEN = 0.1  # share of agents that do not get the run's port


class SeededWorld(World):
    """See ``schedule`` for what is drawn before; this draws delays."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.listener: Callable[[VirtualAgent, bool, Any], None] | None = None
        self.felt: Counter[str] = Counter()  # what struck, and what came of it: see ``faults``
        self.draw = Random(schedule.seed * 7919 + 1)
        self._ease_s = schedule.heartbeat_timeout_s / 10
        self._lives_on = Random(f"{schedule.seed} lives on, in the world")
        self._around = False
        self.network: SeededNetwork
        self.storage: SeededStorage
        self.chain = Chain(self)
        super().__init__(
            schedule.nodes, schedule.spares, schedule.slots, schedule.script, schedule.minimum, schedule.unit,
            heartbeat_timeout_s=schedule.heartbeat_timeout_s, max_without_progress=schedule.max_without_progress,
            chained=schedule.chained, join_timeout_s=6.0, start_timeout_s=schedule.start_timeout_s, stop_grace_s=10.0,
            restart_policy="failed" if schedule.script.independent else "in-process",
        )  # fmt: skip

    def copy_s(self) -> float:
        return self._copies.choice((0.02, 0.1, 0.5))

    def _furnish(self) -> None:
        super()._furnish()
        self._copies = Random(f"{self.schedule.seed} copies")
        self.copy_port = self._copies.choice((0, 1))
        self.network = SeededNetwork(self, self.draw)
        self.storage = SeededStorage(self, self.draw)
        for site in self.sites.values():
            site.clock = (self.draw.uniform(0.0, 1e6), self.draw.uniform(1 - DRIFT, 1 + DRIFT))
            site.unix_offset_s = self.draw.uniform(-5.0, 5.0)
            site.stop_s = self.draw.choice(STOPS_S)
            site.heeds_s = Random(f"{self.schedule.seed} {site.name} heeds").choice(HEEDS_S)

    def record(self, kind: str, fields: dict[str, Any]) -> None:
        super().record(kind, fields)
        self._feel_lives(kind, fields)
        if kind in ("fetched", "not_fetched", "paused", "pause_ended", "tested"):
            self.felt[kind.replace("_", " ")] += 1
        self.felt["started alone"] += kind == "rank_restarted"
        if kind == "slow_start" and fields["phase"] == "preparing" and not self.chain.ended:
            raise Violation("a round was not prepared within the start timeout: somebody waits for what was lost")

    def _feel_lives(self, kind: str, fields: dict[str, Any]) -> None:
        """What became of ranks that could live on, and of last saves."""
        if kind == "ranks_kept":
            self.felt["kept"] += 1
        elif kind == "ranks_left":
            self.felt["left too late"] += bool(fields["others"])
        elif kind == "last_step":
            self.felt["last save"] += fields["step"] >= 0
            self.felt["made for a lost rank"] += bool(fields["made"])
            self.felt["no last save"] += fields["step"] < 0

    def on_message(self, agent: VirtualAgent, said: bool, message: Any) -> None:
        if self.listener is not None:
            self.listener(agent, said, message)

    def _tick(self) -> None:
        """Each agent has its own beat here."""

    def start_agent(self, node: str) -> None:
        super().start_agent(node)
        self._tick_agent(self.agents[node])

    def _tick_agent(self, agent: VirtualAgent) -> None:
        if agent.alive:
            agent.tick()
            wait = (0.5 + 0.5 * self.draw.random()) * (0.1 if not agent.at_ease else self._ease_s)
            self.after(wait, partial(self._tick_agent, agent))

    def port(self, site: Site) -> int:
        """Sometimes somebody else has taken the number."""
        if self.draw.random() < TAKEN:
            self.felt["port taken"] += 1
            return 40_000 + site.incarnations
        return super().port(site)

    def wanted(self, node: str) -> bool:
        """Whether the node's supervisor starts another agent."""
        return self.directory.verdict is None and self.chain.wanted(node)

    def store_is_gone(self, training: Training) -> None:
        """It went between the order and the start: the ranks end when they have waited for long enough."""
        training.broken = True
        self.felt["store gone"] += 1

        def give_up() -> None:
            for agent, _ in list(training.nodes.values()):
                agent.rank_ends(0, 1, None, "the rendezvous timed out")

        self.after(RENDEZVOUS_S, give_up)

    def before_step(self) -> None:
        """Not while the next job trains."""
        if self.chain.trains_since is not None:
            self.chain.check()

    def link_guard(self, agent: VirtualAgent, first: bool) -> LinkGuard:
        """With a job after this one in mind, where there is one."""
        return VirtualGuard(self, agent, first) if self.schedule.has_next_job else super().link_guard(agent, first)

    # -- how ranks behave ----------------------------------------------------------------------------------------

    def _behaviour(self, spans: tuple[float, ...], fates: tuple[str, ...]) -> Behaviour:
        fate = self._lives_on.choice(fates) if self._lives_on.random() < FATES else ""
        return Behaviour(self._lives_on.choice(spans) * self._lives_on.uniform(0.2, 1.0), fate)

    def leaves(self) -> Behaviour:
        return self._behaviour(LEAVES_S, ("deaf", "dies", "stops", "hangs", "waits in vain"))

    def enters(self) -> Behaviour:
        return self._behaviour((0.02, 0.3), ("dies", "stops", "hangs"))

    def saves_last(self) -> Behaviour:
        return self._behaviour((0.05, 0.05, 0.5, 3.0), ("deaf", "dies", "unable", "unable", "unable", "hangs"))

    def makes_s(self) -> float:
        return self._lives_on.choice((0.0, 0.02, 0.02, 0.5, 4.0))

    def has_come(self) -> bool:
        return self._lives_on.random() < 0.7

    def lost_steps(self, steps: int) -> None:
        self.felt["goes on from the last step"] += bool(self.script.holds) and steps <= 0

    def breaks_at(self, training: Training, agent: VirtualAgent, rank: LocalRank) -> None:
        process = agent.processes.of_rank(training.life, rank.local_rank)
        if process is None:
            return
        if self._lives_on.random() < ECHOES:
            lost = "RuntimeError: Connection closed by peer"
            echo = partial(agent.processes.raises, training.nodes[agent.node][1], rank.local_rank, lost, True)
            agent.processes.later(process, self._lives_on.uniform(0.02, 1.0), echo)
        if rank.local_rank == 0:
            self._around = self._lives_on.random() < AROUND  # the end of a step: nodes differ in it
        if not self._around:
            return
        if self._lives_on.random() < 0.5:
            agent.processes.later(process, 0.01, partial(training.gets_through, agent, rank))
        elif self._lives_on.random() < 0.7:
            training.early.add(rank.rank)

    def stands_still(self, nodes: Collection[str]) -> bool:
        if super().stands_still(nodes):
            return True
        if not self.schedule.stalls_when_cut or not self.network.cuts:
            return False
        return any((one, other) in self.network.cuts for one in nodes for other in nodes)
