"""The processes of one node's ranks: which live, in which round, and which live on into the next one.

The real ``KeptRanks``, ``LastStepSaves`` and ``RankReentry`` decide; the world says how each rank behaves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from resilio_hpc.core import rank_link
from resilio_hpc.launch.agent.kept_ranks import KeptRanks
from resilio_hpc.launch.agent.last_step import LastStepSaves
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.forking.spawner_messages import RankCommand
from resilio_hpc.launch.workers.local_rank import LocalRank
from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.rank_evidence import NO_EVIDENCE
from resilio_hpc.launch.workers.rank_reentry import RankReentry
from tests.support.virtual_cluster import lent_snapshots
from tests.support.virtual_cluster.invariants import Violation
from tests.support.virtual_cluster.network import LATENCY_S
from tests.support.virtual_cluster.rank_process import Behaviour, RankProcess
from tests.support.virtual_cluster.ranks import Life, Snapshot, Training, life_of

if TYPE_CHECKING:
    from tests.support.virtual_cluster.agent import VirtualAgent
    from tests.support.virtual_cluster.world import World

ENDS_S = 1.0  # from an error to the end of a process, with a last save in between
NOT_HELD = "NotHeld: an optimizer's step had begun"


class NodeProcesses:
    """Those of one agent; ``pids``: of those that run, by local rank, as the agent knows them."""

    def __init__(self, agent: VirtualAgent, world: World) -> None:
        self.all: dict[int, RankProcess] = {}
        self.pids: dict[int, int] = {}
        self._agent, self._world = agent, world
        self._generation = 0  # grows when ranks are stopped: what was on its way for them is void
        ranks, clock = agent.core.ranks, agent.monotonic
        node: Any = SimpleNamespace(
            name=agent.node, record=agent.record,
            options=SimpleNamespace(reentry=SimpleNamespace(restart_policy="in-process")),
        )  # fmt: skip
        server: Any = self
        self.reentry = RankReentry(server, self.pids, self._end)
        self.last_step = LastStepSaves(
            node, ranks, agent.tell_rank, agent.copies.make_lost, clock, self._is_stopped, self._look
        )
        self.kept = KeptRanks(node, ranks, agent.tell_rank, clock, self._is_stopped, agent.unix)

    @property
    def lives(self) -> set[Life]:
        """Return the rounds in which a process here could make a step."""
        return {process.life for process in self.all.values() if process.life is not None}

    @property
    def is_asked(self) -> bool:
        """Return whether the agent waits for what ranks do before they are ended."""
        return self.kept._local is not None or self.last_step._local is not None

    def tick(self) -> None:
        """Let time pass."""
        self.last_step.tick()
        self.kept.tick()

    def _training(self, life: Life | None) -> Training | None:
        return self._world.trainings.get(life) if life is not None else None

    def of_rank(self, life: Life, local_rank: int) -> RankProcess | None:
        """The process of a rank in this round."""
        found = (one for one in self.all.values() if one.local_rank == local_rank and one.life == life)
        return next(found, None)

    def _stands(self, process: RankProcess) -> bool:
        training = self._training(process.life)
        return process.is_stopped or (training is not None and process.rank in training.stopped)

    def _is_stopped(self, local_rank: int) -> bool:
        process = self.all.get(self.pids.get(local_rank, 0))
        return process is not None and self._stands(process)

    # -- start and end -------------------------------------------------------------------------------------------

    def doom(self, kept: Collection[int] = ()) -> Callable[[], None]:
        """No more is heard of the processes but ``kept``; return what makes them disappear."""
        self._generation += 1
        doomed = [process for pid, process in self.all.items() if pid not in kept]
        lives = {process.life for process in doomed if process.life is not None}
        lives |= {one.life for one in self._world.trainings.values() if one.may_be_down_on(self._agent.node)}
        for life in lives:
            self._world.trainings[life].breaks()

        def gone() -> None:
            for process in doomed:
                self.all.pop(process.pid, None)
            for life in lives:
                self._world.trainings[life].left(self._agent.node)

        return gone

    def all_stopped(self) -> None:
        """The spawner says that only those are left that are kept."""
        self.reentry.others_ended()
        self._agent.core.ranks.all_stopped()

    def spawner_died(self) -> None:
        """The real agent forgets them then."""
        self.pids.clear()

    def start(self, local: LocalRound, start: m.Start, forked_s: float, brings: bool) -> Callable[[], None]:
        """Start the ranks of a round; return what to call when their snapshots have been brought."""
        world, generation, life = self._world, self._generation, life_of(local)
        training = world.training(start)
        awaited: set[object] = {"snapshots"} if brings else set()

        def came(what: object) -> None:
            awaited.discard(what)
            if not awaited and generation == self._generation:
                training.joined(self._agent, local)

        new: list[RankProcess] = []
        for rank in local.ranks.values():
            known = self.all.get(self.pids.get(rank.local_rank, 0))
            if self.reentry.enter(_command(rank, start)):
                assert known is not None
                rank.is_kept = True
                awaited.add(known)
                known.entered = partial(came, known)
            else:
                world.pids += 1
                process = RankProcess(world.pids, rank.rank, rank.local_rank, life, local.number)
                self.all[process.pid] = process
                new.append(process)
        self.reentry.end_others()
        if local.kept:
            self._agent.record("ranks_kept", round=local.number, kept=local.kept)
        if not new:
            self._agent.core.ranks.ranks_started(local.number, 0.0, "in-process")
            return lambda: came("snapshots")
        awaited.add("fork")

        def forked() -> None:
            agent = self._agent
            if agent.alive and generation == self._generation and world.spawns:
                self.pids |= {process.local_rank: process.pid for process in new if process.pid in self.all}
                agent.event(lambda: agent.core.ranks.ranks_started(local.number, forked_s, "fork"))
                if training.script.reenters:
                    for process in new:
                        self.later(process, training.script.start_s / 2, partial(self._attach, process))
                came("fork")

        world.after(forked_s, forked)
        return lambda: came("snapshots")

    def exited(self, local: LocalRound, local_rank: int, how: Any, at: float, error: tuple[str, str]) -> None:
        """The spawner tells of a rank of the present round that ended by itself."""
        process = self.of_rank(life_of(local), local_rank)
        if process is not None:
            self.all.pop(process.pid)
        self.pids.pop(local_rank, None)
        self._agent.core.ranks.ends.exited(local, local_rank, how, at, error)

    def again(self, local: LocalRound, local_rank: int) -> None:
        """A rank of the present round was started again alone."""
        agent, life, ranks = self._agent, life_of(local), self._agent.core.ranks
        if ranks.local is local and not ranks.stop.under_way and self._world.spawns:
            if self.of_rank(life, local_rank) is not None:
                raise Violation("a rank starts again alone, and its process lives")
            pid = self.pids[local_rank] = self._world.pids = self._world.pids + 1
            self.all[pid] = RankProcess(pid, local.ranks[local_rank].rank, local_rank, life, local.number)
            ranks.ends.restarted(local, local_rank, agent.unix())
            if self._world.trainings[life].completed:
                agent.rank_ends(local_rank, 0, None, "")

    def _dies(self, process: RankProcess) -> None:
        """A process ends on its way from round to round; the spawner tells of it soon."""
        self.all.pop(process.pid, None)
        training = self._training(process.life)
        if training is not None:
            training.breaks()
        agent, at = self._agent, self._agent.unix()

        def told() -> None:
            if self.reentry.was_ended(process.pid):
                return
            self.pids.pop(process.local_rank, None)
            ends, local = agent.core.ranks.ends, agent.core.ranks.local
            ends.exited(local, process.local_rank, (1, None), at, ("it ended on its way", ""))

        spawner = agent.spawner
        self._world.after(0.03, lambda: agent.event(told) if spawner == agent.spawner else None)

    def _end(self, pid: int) -> None:
        """Kill one that does not enter the round for which it was kept."""
        self._world.after(LATENCY_S, lambda: self.all.pop(pid, None))

    # -- what ranks hear and say ---------------------------------------------------------------------------------

    def later(self, process: RankProcess, seconds: float, act: Callable[[], None]) -> None:
        """The process does this later, unless it is gone or stopped; with its node it stands still."""

        def due() -> None:
            if process.pid not in self.all or self._stands(process) or not self._agent.alive:
                return
            if self._agent.site.frozen:
                self._world.after(0.2, due)
            else:
                act()

        self._world.after(seconds, due)

    def _says(self, process: RankProcess, message: rank_link.RankMessage) -> None:
        agent, number = self._agent, process.round
        agent.event(lambda: agent.core.ranks.rank_said(number, process.local_rank, message))

    def tell(self, local: LocalRound, local_rank: int, message: rank_link.AgentMessage) -> None:
        """A message that is for a rank's process, and not for its training."""
        process = self.of_rank(life_of(local), local_rank)
        if process is None:
            return
        if isinstance(message, rank_link.LeaveRound):
            self.later(process, LATENCY_S, partial(self._ordered_out, process))
        elif isinstance(message, rank_link.SaveLastStep):
            self.later(process, LATENCY_S, partial(self.save_last, process))

    def tell_process(self, pid: int, message: rank_link.AgentMessage) -> bool:
        """As ``RankServer.tell_process``."""
        process = self.all.get(pid)
        if process is None:
            return False
        assert isinstance(message, rank_link.EnterRound)
        self._world.watch.is_to_enter(
            self._agent, process.rank, _life_in(message), message.variables["RESILIO_RESTORE"]
        )
        self.later(process, LATENCY_S, partial(self._ordered_in, process, message))
        return True

    def _attach(self, process: RankProcess) -> None:
        self._says(process, rank_link.Attach(process.rank, process.local_rank, process.round, process.pid))
        self._says(process, rank_link.CanReenter())

    def _ordered_out(self, process: RankProcess) -> None:
        how = self._world.leaves()
        if process.is_ordered_out or how.fate == "deaf":
            return
        process.is_ordered_out = True
        self._says(process, rank_link.LeavingRound())
        training = self._training(process.life)
        if training is not None:
            training.breaks()
        if process.makes_groups and how.seconds > 0.3:
            how = Behaviour(0.3, "dies")  # it waits for a peer's connection, which nothing ends
        if how.fate == "stops":
            self.later(process, how.seconds, lambda: setattr(process, "is_stopped", True))
        elif how.fate == "dies":
            self.later(process, how.seconds, partial(self._dies, process))
        elif how.fate != "hangs":
            self.later(process, how.seconds, partial(self._leaves, process, how.fate == "waits in vain"))

    def _leaves(self, process: RankProcess, is_last: bool = False) -> None:
        process.life = None
        self._says(process, rank_link.LeftRound(0.1))
        if is_last:
            self.later(process, 0.05, partial(self._dies, process))
        self._enters_if_ordered(process)

    def _ordered_in(self, process: RankProcess, order: rank_link.EnterRound) -> None:
        process.order = order
        self._enters_if_ordered(process)

    def _enters_if_ordered(self, process: RankProcess) -> None:
        if process.order is None or process.life is not None:
            return
        how = self._world.enters()
        if how.fate == "stops":
            self.later(process, how.seconds, lambda: setattr(process, "is_stopped", True))
        elif how.fate != "hangs":
            self.later(process, how.seconds, partial(self._dies if how.fate else self._enters, process))

    def _enters(self, process: RankProcess) -> None:
        order, process.order = process.order, None
        assert order is not None
        life = _life_in(order)
        process.rank, process.round = int(order.variables["RANK"]), life[1]
        process.life, process.is_ordered_out, process.makes_groups = life, False, True
        process.saved, process.saves, process.is_unable = False, 0, False
        self._attach(process)
        process.entered()

    def begins(self, local: LocalRound, holds: str) -> None:
        """The groups of a round are made, and its loop begins."""
        for process in list(self.all.values()):
            if process.life == life_of(local):
                process.makes_groups = False
                if holds:
                    self._says(process, rank_link.HoldsSteps(holds == "shared"))

    def raises(self, local: LocalRound, local_rank: int, message: str, is_echo: bool = False) -> bool:
        """A rank's function ends with an error. Return False where its process ends at once."""
        process, training = self.of_rank(life_of(local), local_rank), self._training(life_of(local))
        rank = local.ranks[local_rank]
        if process is None or training is None or self._stands(process) or process.is_ordered_out or rank.done:
            return False
        if not rank.can_reenter and not training.holds:
            return False
        training.breaks()
        if not is_echo:
            self.later(process, 0.01, partial(self.save_last, process))
        agent, at = self._agent, self._agent.unix()
        if not rank.can_reenter:  # it ends when it has saved
            self.later(process, ENDS_S, partial(agent.rank_ends, local_rank, 1, None, message, "Traceback"))
            return True

        def told() -> None:
            if agent.core.ranks.local is local:
                agent.core.ranks.ends.raised(local, local_rank, at, (message, "Traceback"), NO_EVIDENCE)

        agent.event(told)
        return True

    # -- the last finished step ----------------------------------------------------------------------------------

    def save_last(self, process: RankProcess) -> None:
        """A rank saves the step that it finished last, once."""
        training = self._training(process.life)
        if training is None or not training.holds or process.saved:
            return
        how = self._world.saves_last()
        if how.fate == "deaf":
            return
        process.saves += 1
        if process.saves > 1:  # one at a time
            return
        self._says(process, rank_link.SavingLastStep())
        if how.fate == "dies":
            self.later(process, how.seconds, partial(self._dies, process))
        elif how.fate != "hangs":
            process.is_unable = process.is_unable or how.fate == "unable"  # its state does not change any more
            self.later(process, how.seconds, partial(self._saved, process, training, process.is_unable))

    def _saved(self, process: RankProcess, training: Training, is_unable: bool) -> None:
        again, process.saves, process.saved = process.saves > 1, 0, not is_unable
        step = training.finished(process.rank)
        if not is_unable:
            self._agent.site.take(training.snapshot(process.rank, step), is_last=True)
        self._says(process, rank_link.LastStepSaved(-1, NOT_HELD) if is_unable else rank_link.LastStepSaved(step))
        if again:
            self.save_last(process)

    def _look(self, local: LocalRound) -> Future[tuple[int, list[int]]]:
        """As ``lost_ranks.whole_step``, after a while."""
        found: Future[tuple[int, list[int]]] = Future()
        self._world.after(self._world.makes_s(), lambda: found.set_result(self._whole_step(local)))
        return found

    def _whole_step(self, local: LocalRound) -> tuple[int, list[int]]:
        ranks = [rank.rank for rank in local.ranks.values()]
        return lent_snapshots.whole_step(self._agent.site.memory, ranks, local.number, self._lent(local))

    def _lent(self, local: LocalRound) -> dict[tuple[int, int], Snapshot]:
        training, ranks = self._training(life_of(local)), [rank.rank for rank in local.ranks.values()]
        return lent_snapshots.lent(self._agent.site.memory, ranks, local.number, training)

    def lend(self) -> None:
        """What ranks can restore so is held from now on: none of them takes a step any more."""
        ranks = self._agent.core.ranks
        local = ranks.local or ranks.ends.before
        for copy in self._lent(local).values() if local is not None else ():
            self._agent.site.take(copy, is_last=True)


def _life_in(order: rank_link.EnterRound) -> Life:
    return (int(order.variables["RESILIO_EPOCH"]), int(order.variables["RESILIO_ROUND"]))


def _command(rank: LocalRank, start: m.Start) -> RankCommand:
    point = start.restore_of(rank.rank)
    restore = f"{point.source}:{point.step}" if point is not None else ""
    variables = {
        "RANK": str(rank.rank), "LOCAL_RANK": str(rank.local_rank), "RESILIO_ROUND": str(start.state.round),
        "RESILIO_EPOCH": str(start.state.epoch), "RESILIO_RESTORE": restore,
    }  # fmt: skip
    return RankCommand(rank.local_rank, ("train.py",), "script", variables, "/", "/out", "/err")
