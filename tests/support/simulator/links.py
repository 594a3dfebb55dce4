"""Two jobs of a chain: Slurm ends the first one, not everywhere, and the second begins in the same run directory.

The wait of the second (``link_lease.PredecessorWait``) and the lease of the first (``link_guard.LinkGuard``) are the
real ones. What the second does then is left out: it only has to be the only one that trains.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from resilio_hpc.launch.chain.fencing import EPOCHS, NOWHERE, POLL_S, PredecessorWait, unconfirmed_nodes
from resilio_hpc.launch.controller.lease_guard import LEASE_S, LinkGuard
from resilio_hpc.launch.protocol.job_lease import JOB_LEASE_S
from resilio_hpc.launch.protocol.vote import EpochRecord
from tests.support.virtual_cluster.invariants import Violation

if TYPE_CHECKING:
    from tests.support.simulator.world import SeededWorld
    from tests.support.virtual_cluster.agent import VirtualAgent

WATCHED_S = 60.0  # how long the second job is watched while it trains
# until it trains, but for two heartbeat timeouts: a left-over agent of the first job may move the pulse once more
LONGEST_S = 2 * JOB_LEASE_S + 10.0


class VirtualGuard(LinkGuard):
    """Asks the virtual Slurm."""

    def __init__(self, world: SeededWorld, agent: VirtualAgent, first: bool) -> None:
        super().__init__("job", agent.monotonic(), first)
        self._world = world
        self._agent = agent
        self._waits = False

    def tick(self, now: float) -> None:
        """When the run directory has been silent for long; the answer is a while on its way."""
        if self._waits or self._lease.ends_in_s(now) >= LEASE_S / 2:
            return
        chain = self._world.chain
        runs = not chain.ended
        if self._agent.node in chain.unreached:
            return  # slurmctld does not answer there
        self._waits = True
        self._world.after(5.0 * self._world.draw.random(), lambda: self._agent.event(partial(self._told, now, runs)))

    def _told(self, asked: float, runs: bool) -> None:
        self._waits = False
        if runs:
            self._lease.slurm_says_running(asked)


class Chain:
    """What Slurm knows, and the job after this one."""

    def __init__(self, world: SeededWorld) -> None:
        self.ended = False  # the first job, as far as Slurm knows
        self.unreached: frozenset[str] = frozenset()  # its nodes where that is not known
        self.trains_since: float | None = None
        self._world = world
        self._wait: PredecessorWait | None = None

    def ends(self, unreached: tuple[str, ...], begins_in_s: float) -> None:
        """Slurm ends the job: its processes are killed wherever it can. The next one begins."""
        self.ended = True
        self.unreached = frozenset(unreached)
        for node in list(self._world.agents):
            if node not in self.unreached:
                self._world.kill_agent(node)
        self._world.after(begins_in_s, self._begin)

    def reaches_all(self) -> None:
        """The nodes' daemons hear at last that the job is over."""
        rest, self.unreached = self.unreached, frozenset()
        for node in sorted(rest & self._world.agents.keys()):
            self._world.kill_agent(node)

    def wanted(self, node: str) -> bool:
        """Whether a supervisor is there that starts another agent."""
        return not self.ended or node in self.unreached

    # -- the next job ------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """As ``chaining``. The first job took epoch 0."""
        world = self._world
        directory = world.directory
        epoch = (directory.newest // EPOCHS + 1) * EPOCHS
        directory.epochs.append(EpochRecord(epoch, "", NOWHERE, "next-begins"))
        ended = directory.verdict is not None
        self._wait = PredecessorWait(world.config.heartbeat_timeout_s, world.now, ended)
        self._look()

    def _look(self) -> None:
        world, wait = self._world, self._wait
        assert wait is not None
        silent = world.draw.random() < 0.1
        states = {node: "DOWN+NOT_RESPONDING" if node in self.unreached else "IDLE" for node in world.sites}
        unconfirmed = unconfirmed_nodes(tuple(world.sites), None if silent else states)
        answer = wait.look(world.now, unconfirmed, world.directory.pulse)
        if answer == "go":
            world.record("next_job_trains", {"waited_s": world.now})
            world.felt["next job"] += 1
            self.trains_since = world.now
            self.check()
        elif answer == "alive":
            raise Violation("the next job does not begin, though the one before was ended long ago")
        else:
            world.after(POLL_S, self._look)

    def check(self) -> None:
        """No rank of the first job that could make a step."""
        for agent in self._world.agents.values():
            if agent.lives() and not agent.site.frozen:
                raise Violation(f"ranks of the job before live on {agent.node} while the next job trains")
