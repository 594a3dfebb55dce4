"""Virtual ranks: a training run in lockstep whose state is its own history, so that mixed lives show themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from resilio_hpc.ckpt.snapshot.boundary_record import BoundaryRecord
from resilio_hpc.core import rank_link
from resilio_hpc.core.tiers import Tier
from resilio_hpc.diagnose.hangs.rank_sight import CallSight, GroupSight, RankSight
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.local_rank import LocalRank
from resilio_hpc.launch.workers.local_round import LocalRound

if TYPE_CHECKING:
    from tests.support.virtual_cluster.agent import VirtualAgent
    from tests.support.virtual_cluster.world import World

Life = tuple[int, int]  # (epoch, round)
History = tuple[tuple[int, int, int], ...]  # (step from which on, epoch, round): which lives computed the state


def life_of(local: LocalRound) -> Life:
    """Which life of the ranks a node's part belongs to."""
    return (local.epoch, local.number)


@dataclass(frozen=True)
class Script:
    """What the training script does. ``attached``: it uses resilio_hpc.train, else it is a plain program."""

    steps: int = 1000
    step_s: float = 0.1
    save_every: int = 10
    attached: bool = True
    start_s: float = 0.3  # from the fork to the first step's begin
    ignores_stop: bool = False
    exits_early_at: int = -1  # rank 0 exits with 0 after this step, without a word
    stays_out: int = -1  # in the first round this rank exits with 0 and never attaches
    shows_calls: bool = True  # of communication libraries
    never_comes: int = -1  # in the first round the others wait for this rank in init_process_group
    alone: bool = False  # ranks that report no steps do not need one another
    reenters: bool = False  # its function is marked @train.restartable
    holds: Literal["", "own", "shared"] = (
        ""  # ranks can save the last finished step; "shared": they have the same tensors
    )

    @property
    def independent(self) -> bool:
        return self.alone and not self.attached

    @property
    def saves_last(self) -> bool:
        """Whether the state after the last step is saved."""
        return self.attached and self.steps % self.save_every == 0


@dataclass
class Snapshot:
    """One rank's copy in shared memory. ``own``: the step of what is its own alone, beside what ranks share."""

    rank: int
    step: int
    world_size: int
    history: History
    life: Life
    own: int

    @property
    def round(self) -> int:
        """In which it was taken."""
        return self.life[1]


@dataclass
class Training:
    """One round's ranks on all nodes."""

    world: World
    start: m.Start
    script: Script
    step: int = 0
    history: History = ()
    nodes: dict[str, tuple[VirtualAgent, LocalRound]] = field(default_factory=dict)
    broken: bool = False  # a rank is gone: the collectives hang
    target: int = -1
    confirmed: set[str] = field(default_factory=set)  # nodes
    saving: bool = False
    pause_confirmed: dict[str, float] = field(default_factory=dict)  # node → for how long its ranks may pause
    pauses: dict[str, float] = field(default_factory=dict)  # node → until when its ranks do
    resumed: set[str] = field(default_factory=set)  # nodes
    stopped: set[int] = field(default_factory=set)  # ranks (SIGSTOP)
    state_of_absent: str = "R"
    may_wait_s: float = 0.0  # the longest time limit of the process groups, as ranks tell it
    tells_stacks: bool = True  # of ranks that wait to begin
    absent: set[int] = field(default_factory=set)  # ranks that compute, and do not enter the call of the others
    first: int = -1  # the step from which this round goes on; -1: it has not begun
    ahead: set[int] = field(default_factory=set)  # ranks that have finished one step more than the others
    early: set[int] = field(default_factory=set)  # ranks that had begun that step's end when it broke

    @property
    def completed(self) -> bool:
        """Every step is done."""
        return self.step >= self.script.steps

    @property
    def life(self) -> Life:
        return (self.start.state.epoch, self.start.state.round)

    @property
    def round(self) -> int:
        return self.start.state.round

    def joined(self, agent: VirtualAgent, local: LocalRound) -> None:
        """A node's ranks were forked."""
        self.nodes[agent.node] = (agent, local)
        if len(self.nodes) == len(self.start.state.members):
            self.world.after(self.script.start_s, self._begin)

    def left(self, node: str) -> None:
        """A node's ranks are gone."""
        self.breaks()
        self.nodes.pop(node, None)

    def may_be_down_on(self, node: str) -> bool:
        """Whether all ranks of a node may wait to start again alone."""
        return self.script.independent and node in self.nodes

    # -- when the ranks cannot go on -----------------------------------------------------------------------------

    @property
    def holds(self) -> bool:
        """Whether ranks can save the step that they finished last."""
        return bool(self.script.holds) and self.first >= 0

    @property
    def shares(self) -> bool:
        """Whether ranks have the same tensors."""
        return self.script.holds == "shared"

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return sum(member.local_world_size for member in self.start.state.members)

    def finished(self, rank: int) -> int:
        """The step that a rank finished last."""
        return self.step + (rank in self.ahead)

    def breaks(self) -> None:
        """A rank is gone, or leaves: the collectives hang. Some may just have got through the last one."""
        if self.broken:
            return
        self.broken = True
        goes_on = self.step + 1 < self.script.steps and self.step != self.target and not (self.pauses or self.saving)
        if not self.holds or not goes_on or self.stopped | self.absent or self.world.stands_still(self.nodes):
            return
        for agent, local in list(self.nodes.values()):
            for rank in local.ranks.values():
                self.world.breaks_at(self, agent, rank)

    def gets_through(self, agent: VirtualAgent, rank: LocalRank) -> None:
        """A rank finishes the step in which the others broke."""
        self.ahead.add(rank.rank)
        self._say(agent, rank.local_rank, rank_link.StepDone(self.step + 1, self.world.unix()))
        if (self.step + 1) % self.script.save_every == 0:
            agent.site.take(self.snapshot(rank.rank, self.step + 1))
            self._say(agent, rank.local_rank, rank_link.SnapshotTaken(self.step + 1, "arena", 1000, 0.01))

    def snapshot(self, rank: int, step: int, own: int = -1) -> Snapshot:
        """A rank's copy of a step of this round; ``own``: where it is made of another one's, with a record."""
        before = tuple(entry for entry in self.history if entry[0] < step)
        return Snapshot(rank, step, self.size, before, self.life, own if own >= 0 else step)

    def records(self, rank: int) -> list[BoundaryRecord]:
        """What a rank has left in shared memory at its last boundaries."""
        last = self.finished(rank)
        steps = [step for step in (last - 1, last) if step >= self.first >= 0]
        found = [BoundaryRecord(step, self.size, self.round, False, b"") for step in steps]
        return [*found, *(BoundaryRecord(last + 1, self.size, self.round, True, b"") for _ in {rank} & self.early)]

    def say_section(self, name: str) -> None:
        """All ranks enter a section."""
        self._say_all(rank_link.Section(name))

    def _say_all(self, message: rank_link.RankMessage) -> None:
        for agent, local in list(self.nodes.values()):
            for rank in local.ranks:
                self._say(agent, rank, message)

    def _say(self, agent: VirtualAgent, local_rank: int, message: rank_link.RankMessage) -> None:
        if self.round == 0 and self.nodes[agent.node][1].ranks[local_rank].rank == self.script.stays_out:
            if isinstance(message, rank_link.Attach):
                agent.rank_ends(local_rank, 0, None, "")
            return
        agent.event(lambda: agent.core.ranks.rank_said(self.round, local_rank, message))

    @property
    def _waits_to_begin(self) -> bool:
        return self.round == 0 and self.script.never_comes >= 0

    def _begin(self) -> None:
        if self.broken or self._waits_to_begin:
            return
        self.world.watch.trains(self.life)
        if not self.script.attached:
            self.world.after(self.script.step_s, self._plain_step)
            return
        for agent, local in list(self.nodes.values()):
            for rank in local.ranks.values():
                if not self.script.reenters:  # else it has said so
                    self._say(agent, rank.local_rank, rank_link.Attach(rank.rank, rank.local_rank, self.round, 1))
        restore = self.start.restore
        if restore is not None:
            contents = {self._content(agent, rank.rank, self.start.restore_of(rank.rank) or restore)
                        for agent, local in self.nodes.values() for rank in local.ranks.values()}  # fmt: skip
            self.world.watch.restores(self.life, contents)
            self.world.watch.starts(self.life, restore.step)
            (content,) = contents
            if content is None:
                self._restore_fails(restore)
                return
            self.step, self.history = restore.step, content
            self._say_all(rank_link.Restored(restore.step, restore.source, self.world.load_s))
        else:
            self.world.watch.starts(self.life, -1)
        if self.completed:  # there was only its last save to wait for
            self._finish()
            return
        self.first = self.step
        for agent, local in list(self.nodes.values()):
            agent.processes.begins(local, self.script.holds)
        self.history = (*self.history, (self.step, *self.life))
        self.world.after(self.script.step_s, self._step)

    def _content(self, agent: VirtualAgent, rank: int, restore: m.RestorePoint) -> History | None:
        if restore in self.world.bad_copies:
            return None
        if restore.source == Tier.MEMORY:
            return self.world.watch.restored(self.life, restore, agent.site.memory.get((rank, restore.step)))
        return self.world.watch.read(self.life, restore.step)

    def _restore_fails(self, restore: m.RestorePoint) -> None:
        agent, _ = next(iter(self.nodes.values()))
        self._say(agent, 0, rank_link.RestoreFailed(restore.step, restore.source, "checksum"))
        agent.rank_ends(0, 98, None, "")

    def _plain_step(self) -> None:
        """Of a script that tells of no steps."""
        if self.broken or self._held_up(self._plain_step):
            return
        self.world.watch.trains(self.life)
        self.step += 1
        if self.completed:
            self._exit_all()
        else:
            self.world.after(self.script.step_s, self._plain_step)

    def sight(self, rank: LocalRank) -> RankSight:
        """What its agent sees of a rank: the others wait in the collective of a step that a stopped one does not do."""
        stopped = rank.rank in self.stopped
        if self._waits_to_begin or (self.script.reenters and self.first < 0):
            comes = rank.rank != self.script.never_comes and self._has_come(rank)
            joins, place = ("init_process_group", "train.py:9") if comes else ("", "train.py:5")
            found = RankSight(rank.rank, state="T" if stopped else "S", may_wait_s=self.may_wait_s)
            return msgspec.structs.replace(found, place=place, joins=joins) if self.tells_stacks else found
        entered = self.step + (bool(self.stopped | self.absent) and rank.rank not in self.stopped | self.absent)
        group = GroupSight(1, "virtual", rank.rank, self.size, entered)
        call = CallSight(0, "all_reduce", entered, completed=entered == self.step)
        state = "T" if stopped else self.state_of_absent if rank.rank in self.absent else "S"
        place = "" if stopped else "data.py:12" if rank.rank in self.absent else "train.py:40"
        found = RankSight(rank.rank, rank.step, state, place=place, may_wait_s=self.may_wait_s)
        shown = msgspec.structs.replace(found, begun=entered, completed=self.step, groups=(group,), calls=(call,))
        return shown if self.script.shows_calls else found

    def _has_come(self, rank: LocalRank) -> bool:
        """Whether a rank waits for its peers, and not in another round, or on its way from one to the other."""
        nodes = self.nodes.values()
        parts = [agent for agent, local in nodes if local.ranks.get(rank.local_rank) is rank]
        return self._waits_to_begin or any(agent.processes.of_rank(self.life, rank.local_rank) for agent in parts)

    def _held_up(self, call: Callable[[], None]) -> bool:
        """A collective waits for a node that stands still, or a rank."""
        if not self.world.stands_still(self.nodes) and not self.stopped and not self.absent:
            return False
        self.world.after(0.2, call)
        return True

    def _step(self) -> None:
        if self.broken or self._held_up(self._step):
            return
        self.world.watch.trains(self.life)
        self.step += 1
        self._say_all(rank_link.StepDone(self.step, self.world.unix()))
        if self.step == self.script.exits_early_at and self.round == 0:
            next(iter(self.nodes.values()))[0].rank_ends(0, 0, None, "")
            return
        if self.completed:
            if self.script.saves_last:
                self._snapshot()  # and nobody waits for it
            self._finish()
        elif self.step == self.target:
            self._await_confirmation()
        else:
            if self.step % self.script.save_every == 0:
                self._snapshot()
            self.world.after(self.script.step_s, self._step)

    def _finish(self) -> None:
        self._say_all(rank_link.Finished(self.step))
        self._exit_all()

    def _exit_all(self) -> None:
        for agent, local in list(self.nodes.values()):
            for rank in local.ranks:
                if not self.script.independent or rank in agent.processes.pids:
                    agent.rank_ends(rank, 0, None, "")

    def _snapshot(self) -> None:
        for agent, local in self.nodes.values():
            for rank in local.ranks.values():
                agent.site.take(self.snapshot(rank.rank, self.step))
        self._say_all(rank_link.SnapshotTaken(self.step, "arena", 1000, 0.01))

    # -- the agreed stop ---------------------------------------------------------------------------------------

    def told(self, agent: VirtualAgent, local_rank: int, message: rank_link.AgentMessage) -> None:
        """A rank hears from its agent."""
        if self.broken or self.script.ignores_stop:
            return
        if isinstance(message, rank_link.StopAt):
            accepted = self.step <= message.target and not self.saving
            if accepted:
                self.target = max(self.target, message.target)
                self.resumed.discard(agent.node)
                if self.pause_confirmed.pop(agent.node, None) is not None:
                    self._leave_pause(agent.node)
            answer = rank_link.StopAck(message.target, accepted, self.step)
            self._say(agent, local_rank, answer)
        elif isinstance(message, rank_link.StopConfirmed):
            self.confirmed.add(agent.node)
        elif isinstance(message, rank_link.PauseConfirmed):
            if message.target == self.target and agent.node not in self.pause_confirmed:
                self.pause_confirmed[agent.node] = message.limit_s
        elif isinstance(message, rank_link.Resume):
            self.pause_confirmed.pop(agent.node, None)
            self.resumed.add(agent.node)
        elif isinstance(message, rank_link.SaveAt):
            pass  # they save every few steps
        elif message.step == self.target and self.saving and message.stage == "committed":
            self.world.after(0.0, self._end_stopped)
        elif message.step == self.target and self.saving and message.stage == "failed":
            agent.rank_ends(local_rank, 1, None, "CheckpointError: the last save failed")  # as its wait() raises

    def _await_confirmation(self) -> None:
        if self.broken:
            return
        now, here = self.world.now, self.nodes.keys()
        if self.confirmed == here:
            if not self.saving:
                self.saving = True
                self._snapshot()
            return
        if self.target > self.step:  # another proposal
            self.resumed.clear()
            self.world.after(self.script.step_s, self._step)
            return
        for node, limit_s in self.pause_confirmed.items():
            if node not in self.pauses:
                self.pauses[node] = now + limit_s
                self._say_section(node, rank_link.PAUSED)
        for node in [node for node, until in self.pauses.items() if node in self.resumed or now > until]:
            self._leave_pause(node)
            self.resumed.add(node)
        if self.resumed >= here:
            self.target = -1
            self.resumed.clear()
            self.pause_confirmed.clear()
            self.world.after(self.script.step_s, self._step)
        else:
            self.world.after(0.01, self._await_confirmation)

    def _leave_pause(self, node: str) -> None:
        if self.pauses.pop(node, None) is not None:
            self._say_section(node, "")

    def _say_section(self, node: str, name: str) -> None:
        agent, local = self.nodes[node]
        for rank in local.ranks:
            self._say(agent, rank, rank_link.Section(name))

    def _end_stopped(self) -> None:
        if not self.broken and self.nodes:
            self._say_all(rank_link.Stopped(self.step))
            self._exit_all()
            self.broken = True
