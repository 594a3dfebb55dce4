"""What must hold at every moment of every run, whatever breaks. Each is asserted while the run goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from resilio_hpc.core.tiers import Tier
from resilio_hpc.launch.controller.checkpoints.checkpoint_phase import SETTLE_S
from resilio_hpc.launch.controller.controller import Controller
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.membership import NEVER, quorum_since

if TYPE_CHECKING:
    from tests.support.virtual_cluster.agent import VirtualAgent
    from tests.support.virtual_cluster.ranks import History, Life, Snapshot
    from tests.support.virtual_cluster.world import World


SLACK_S = 0.05  # a kill takes effect, a message is on its way within the node
Leader = tuple[int, str]  # (epoch, endpoint)
SUPPORT = (m.Hello, m.Heartbeat, m.VotersUpdated)  # that ranks have stopped is a fact, whoever hears it


@dataclass
class Supported:
    """A controller's backing, seen from outside."""

    controller: Controller
    heard: dict[str, float] = field(default_factory=dict)  # node → when
    quorum_at: float = NEVER  # the latest time since when a quorum has been heard

    def count(self) -> float:
        """Who is a quorum may change between two heartbeats."""
        membership, witnessed = self.controller.run.membership, self.controller.voters._witnessed
        now_at = quorum_since(membership, lambda node: self.heard.get(node, NEVER), witnessed)
        self.quorum_at = max(self.quorum_at, now_at)
        return self.quorum_at


class Violation(AssertionError):
    """An invariant does not hold."""


def computed_before(history: History, step: int) -> History:
    """The lives that computed the state of ``step``, when ``history`` goes beyond it."""
    return tuple(entry for entry in history if entry[0] < step)


class Invariants:
    """Looks at the world from outside, at true time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._controllers: dict[int, str] = {}  # epoch → endpoint of the one that others follow
        self._leaders: dict[int, VirtualAgent] = {}
        self._promised: dict[str, int] = {}  # node → the newest epoch that it promised: its later processes know it
        self._followed: dict[str, int] = {}  # incarnation → the newest epoch that it followed: kept once it is heard
        self._supported: dict[Leader, Supported] = {}  # who was with a controller, and when
        self._led: dict[tuple[str, Leader], float] = {}  # when the node last heard the controller
        self._decided: set[Life] = set()  # rounds that were started
        self._hung: dict[int, History] = {}  # steps whose commit hung for so long that a round may go on without them

    def trains(self, life: Life) -> None:
        """A round makes a step: no rank of another one lives."""
        self._world.before_step()
        for agent in self._world.agents.values():
            if agent.lives() and not agent.site.frozen and not self._is_leased(agent.node):
                raise Violation(f"ranks live on {agent.node}, though no controller with a quorum can have leased them")
            for other in agent.lives():
                if other != life and not agent.site.frozen:
                    raise Violation(
                        f"round {life[1]} makes a step while a rank of round {other[1]} lives on {agent.node}"
                    )

        self._take_part(life)

    def _take_part(self, life: Life) -> None:
        """Each of the round's ranks has a process in it, and no other process waits on its nodes."""
        training = self._world.trainings[life]
        for node, (agent, local) in training.nodes.items():
            if not training.script.reenters or agent.site.frozen:
                continue
            found = sorted(process.rank for process in agent.processes.all.values() if process.life == life)
            if found != sorted(rank.rank for rank in local.ranks.values() if not rank.done):
                raise Violation(f"round {life[1]} makes a step with the processes of ranks {found} on {node}")
            if any(process.life is None for process in agent.processes.all.values()):
                raise Violation(f"round {life[1]} makes a step while a process waits on {node} for a round")

    def stopped(self, agent: VirtualAgent) -> None:
        """An agent says that no rank of an earlier round lives: the next one may start."""
        if agent.lives():
            raise Violation(
                f"{agent.node} says that its ranks have stopped, and those of {agent.lives()} could make a step"
            )

    def is_to_enter(self, agent: VirtualAgent, rank: int, life: Life, restore: str) -> None:
        """A process that has left a round gets its place in another one: its agent's, at a state that all restore."""
        local = agent.core.ranks.local
        if local is None or (local.epoch, local.number) != life:
            raise Violation(f"rank {rank} on {agent.node} is to enter round {life[1]}, which its agent does not run")
        if not restore:
            raise Violation(f"rank {rank} on {agent.node} begins training again, with what it has trained before")

    def restored(self, life: Life, restore: m.RestorePoint, copy: Snapshot | None) -> History:
        """A rank restores a snapshot in its node's memory: it is there, and all of it of one step."""
        if copy is None:
            raise Violation(f"round {life[1]} restores step {restore.step}, which a rank does not hold")
        if copy.own != restore.step:
            raise Violation(f"round {life[1]} restores step {restore.step} with a rank's own part of step {copy.own}")
        return copy.history

    def read(self, life: Life, step: int) -> History:
        """A rank reads a step from the run directory: it is there."""
        if step not in self._world.directory.committed:
            raise Violation(f"round {life[1]} reads step {step}, which is not committed")
        return self._world.directory.committed[step]

    def _was_in(self, node: str, life: Life) -> bool:
        """Whether a node's agent knows that it took part in a life."""
        agent = self._world.agents.get(node)
        state = None if agent is None else agent.core.ranks.state
        return state is not None and state.life == life

    def decides(self, start: m.Start) -> None:
        """A controller starts a round: from the newest step of the life before that each rank has on its node."""
        life, follows = start.state.life, start.follows
        before = self._world.trainings.get(follows)
        if life in self._decided or before is None or self._world.config.on_corruption == "restore":
            return  # the newest steps may be corrupt
        self._decided.add(life)
        members, size = start.state.members, sum(member.local_world_size for member in start.state.members)
        if any(not self._was_in(member.node, follows) for member in members):
            return  # what it holds does not count
        steps: list[set[int]] = []
        for member in members:
            memory, ranks = self._world.sites[member.node].memory, member.ranks
            steps += [
                {s for (r, s), x in memory.items() if (r, x.life, x.world_size) == (rank, follows, size)}
                for rank in ranks
            ]
        common = max(set.intersection(*steps), default=-1)
        goes_on = start.restore.step if start.restore is not None else -1
        if goes_on < common:
            raise Violation(f"round {life[1]} starts from step {goes_on}, though each rank holds step {common}")
        if before.first >= 0:
            lost = max(before.finished(rank) for rank in range(before.size)) - goes_on
            self._world.lost_steps(lost)

    def _is_leased(self, node: str) -> bool:
        """Whether a controller that this node heard had a quorum, both within the heartbeat timeout."""
        since = self._world.now - self._world.config.heartbeat_timeout_s - SLACK_S
        heard = [known for leader, known in self._supported.items() if self._led.get((node, leader), since) > since]
        return any(known.quorum_at > since or known.count() > since for known in heard)

    def supports(self, controller: Controller, message: m.Heartbeat) -> None:
        """A heartbeat has arrived at its controller."""
        leader = (controller.run.epoch, controller.run.term.endpoint)
        known = self._supported.setdefault(leader, Supported(controller))
        if message.epoch == controller.run.epoch:
            known.heard[message.node] = self._world.now
            known.count()

    def led(self, agent: VirtualAgent, message: m.ToAgent) -> None:
        """A controller's word has arrived."""
        if isinstance(message, m.Beat) and agent.connection is not None:
            self._led[agent.node, (message.epoch, agent.connection.endpoint)] = self._world.now

    def restores(self, life: Life, contents: set[History | None]) -> None:
        """The ranks of a round restore their copies: all from the same life."""
        if len(contents) != 1:
            raise Violation(f"round {life[1]} mixes lives: {contents}")

    def starts(self, life: Life, step: int) -> None:
        """A round's first rank starts, from the state of ``step`` (-1: anew)."""
        newest = max(self._world.directory.committed.keys() - self._bad() - self._late(), default=-1)
        if step < newest:
            raise Violation(f"round {life[1]} starts from step {step}, but step {newest} is committed")

    def _bad(self) -> set[int]:
        return {copy.step for copy in self._world.bad_copies if copy.source == Tier.COMMITTED}

    def commits(self, step: int, epoch: int, contents: set[History], hung_s: float) -> None:
        """A manifest is written, so long after the order.

        A round that has to go back waits for SETTLE_S; a commit that comes even later is of a life that was left. It is
        whole, and stays until the step is committed again.
        """
        directory = self._world.directory
        if len(contents) != 1:
            raise Violation(f"step {step} is committed from different lives: {contents}")
        (history,) = contents
        if epoch < directory.fence:
            raise Violation(f"epoch {epoch} commits step {step}, but epoch {directory.fence} goes on from older ones")
        exempt = self._bad() | self._late()
        for known, content in directory.committed.items():
            one, other = (history, content) if known >= step else (content, history)
            if known not in exempt and computed_before(other, min(known, step)) != one:
                raise Violation(f"step {step} is committed as {history}, but step {known} was as {content}")

        self._hung.pop(step, None)
        if hung_s > SETTLE_S:
            self._hung[step] = history

    def _late(self) -> set[int]:
        """Those that later rounds of that epoch have gone on without, from an older step."""
        return {step for step, history in self._hung.items() if self._was_left(history[-1], step)}

    def _was_left(self, life: tuple[int, int, int], step: int) -> bool:
        for _, start in self._world.starts:
            is_later = start.state.epoch == life[1] and start.state.round > life[2]
            if is_later and (start.restore.step if start.restore is not None else -1) < step:
                return True
        return False

    def leads(self, agent: VirtualAgent, epoch: int) -> None:
        """A process becomes controller: an epoch has one, ever."""
        known = self._leaders.setdefault(epoch, agent)
        if known is not agent:
            raise Violation(f"{agent.incarnation} leads epoch {epoch}, as {known.incarnation} did")

    def follows(self, agent: VirtualAgent, epoch: int, endpoint: str) -> None:
        """An agent follows a controller."""
        known = self._controllers.setdefault(epoch, endpoint)
        if known != endpoint:
            raise Violation(f"{agent.node} follows {endpoint} in epoch {epoch}, others {known}")
        if epoch < self._bound(agent):
            raise Violation(f"{agent.node} follows epoch {epoch} after it promised {self._bound(agent)}")
        self._followed[agent.incarnation] = epoch

    def says(self, agent: VirtualAgent, message: m.ToController) -> None:
        """An agent supports a controller."""
        if isinstance(message, SUPPORT) and message.epoch < self._bound(agent):
            word = type(message).__name__
            raise Violation(f"{agent.node} says {word} to epoch {message.epoch} after it promised {self._bound(agent)}")

    def _bound(self, agent: VirtualAgent) -> int:
        """The newest epoch that an agent has promised or followed: older ones get no support from it."""
        return max(self._promised.get(agent.node, 0), self._followed.get(agent.incarnation, 0))

    def promises(self, node: str, epoch: int) -> None:
        """A node gives its vote."""
        if epoch < self._promised.get(node, 0):
            raise Violation(f"{node} promises epoch {epoch} after {self._promised[node]}")
        self._promised[node] = epoch

    def recorded(self, kind: str, fields: dict[str, object]) -> None:
        """The ledger gets an event: ranks that pause have not stalled, and do not hang."""
        if kind in ("stalled", "hang"):
            for training in self._world.trainings.values():
                if training.round == fields["round"] and training.pauses and not training.stopped | training.absent:
                    raise Violation(f"round {training.round} pauses, and is taken for {kind}")

    def ended(self) -> None:
        """Every agent has left."""
        world = self._world
        if world.directory.verdict is None or world.directory.verdict["verdict"] != "completed":
            return
        if not any(life.completed for life in world.trainings.values()):
            raise Violation("the verdict is completed, but training is not")
        step = world.script.steps
        unwritten = any(fields["step"] == step for fields in world.records("persist_failed"))
        if world.script.saves_last and step not in world.directory.committed and not unwritten:
            raise Violation(
                f"the verdict is completed, but what was saved after the last step, {step}, is not committed"
            )
