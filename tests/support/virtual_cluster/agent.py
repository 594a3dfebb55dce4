"""One agent process: the real AgentCore, with virtual ports."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from resilio_hpc.ckpt.format.manifest import Extent, RankRecord, ShardRecord
from resilio_hpc.core import rank_link
from resilio_hpc.launch.agent.decisions.agent_core import AgentCore
from resilio_hpc.launch.config.agent_settings import Graces
from resilio_hpc.launch.controller.controller import Controller
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.membership import first_membership
from resilio_hpc.launch.protocol.vote import EpochRecord, Term, VoteRecord
from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.rank_owner import StopHow
from tests.support.virtual_cluster.copies import VirtualCopies
from tests.support.virtual_cluster.directory import JOB
from tests.support.virtual_cluster.host import VirtualHost
from tests.support.virtual_cluster.network import Connection
from tests.support.virtual_cluster.process import Process
from tests.support.virtual_cluster.processes import NodeProcesses
from tests.support.virtual_cluster.ranks import Life, life_of

if TYPE_CHECKING:
    from tests.support.virtual_cluster.world import Site, World

FORK_S = 0.02


class VirtualAgent(Process):
    """Implements ``Ports``."""

    def __init__(self, world: World, site: Site) -> None:
        super().__init__()
        self.node = site.name
        self.site = site
        self.stores: set[int] = set()  # ports
        self.connection: Connection | None = None  # to the controller that we follow
        self.port = world.port(site)
        self.endpoint = f"{self.node}:{self.port}"
        self.host = VirtualHost(world, self)
        self.said: list[m.ToController] = []
        self.heard: list[m.ToAgent] = []
        self.judged: list[m.Cause | None] = []  # causes that the console was told
        self._world = world
        self._stops = 0  # orders to stop the ranks
        self.spawner = 0  # counts those that were killed
        self.incarnation = f"{self.node}.{site.incarnations}"
        self.copies = VirtualCopies(self, world)
        hello = m.Hello(self.node, self.incarnation, 0, self.endpoint, self.node, world.slots, last=site.kept,
                        disk_port=world.disk_port)  # fmt: skip
        vote_record = site.vote_record or VoteRecord(first_membership(world.config.expected))
        timeout_s = world.config.heartbeat_timeout_s
        self.core = AgentCore(hello, JOB, vote_record, self, timeout_s, graces=Graces(world.failure_grace_s))
        self.processes = NodeProcesses(self, world)

    @property
    def controller(self) -> Controller | None:
        """The controller in this process."""
        return self.host.controller

    @property
    def follows(self) -> str:
        return self.connection.node if self.connection else ""

    @property
    def at_ease(self) -> bool:
        """Whether nothing is urgent."""
        return self.core.next_wakeup_s > 0.06 and not self.processes.is_asked

    # -- events ------------------------------------------------------------------------------------------------

    def hears(self, message: m.ToAgent) -> None:
        """The controller's word has arrived."""
        self.event(lambda: self._hear(message))

    def _hear(self, message: m.ToAgent) -> None:
        self._world.on_message(self, False, message)
        self._world.watch.led(self, message)
        self.core.controller_said(message)

    def lost_connection(self) -> None:
        """The transport tells that the connection broke."""
        self.event(self.core.connection_lost)

    def lives(self) -> set[Life]:
        """(epoch, round) of the ranks that are alive here."""
        return self.processes.lives

    def rank_rounds(self) -> set[int]:
        return {number for _, number in self.lives()}

    def die(self) -> None:
        self.alive = False
        self.processes.doom()()

    def store_dies(self) -> None:
        """The process with the newest rendezvous store is killed."""
        self.stores.clear()
        self.core.ranks.store_died(self.core.ranks.store.round, "killed", self.unix())

    def spawner_dies(self) -> None:
        """The process that forks ranks is killed, and they go with it; what it was doing is not answered."""
        self.spawner += 1
        self.processes.doom()()
        self.processes.spawner_died()
        self.core.ranks.spawner_died(self.unix())

    def tick(self) -> None:
        if self.alive and not self.suspended:
            self.host.tick()
        if self.alive and not self.suspended:
            self.core.tick()
        if self.alive and not self.suspended:
            self.processes.tick()

    def rank_ends(
        self, local_rank: int, exit_code: int | None, signal: int | None, message: str, traceback: str = ""
    ) -> None:
        """A rank exits by itself."""
        local = self.core.ranks.local
        if self.alive and local is not None:
            training = self._world.trainings.get(life_of(local))
            if exit_code != 0 and training is not None and not training.script.independent:
                training.breaks()
            at, error = self.unix(), (message, traceback)
            self.event(lambda: self._rank_exited(local, local_rank, (exit_code, signal), at, error))

    def raises(self, local_rank: int, message: str) -> bool:
        """A rank's function raises; False: its process does not outlive that."""
        local = self.core.ranks.local
        if not self.alive or local is None:
            return False
        return self.processes.raises(local, local_rank, message)

    def _rank_exited(self, local: LocalRound, local_rank: int, how: Any, at: float, error: tuple[str, str]) -> None:
        if self.core.ranks.local is local:
            self.processes.exited(local, local_rank, how, at, error)

    def next_name(self) -> bytes:
        """Of another connection, as the real agent calls it."""
        self.site.calls += 1
        return f"{self.node}/boot/{self.site.calls}".encode()

    # -- ports -------------------------------------------------------------------------------------------------

    @property
    def files(self) -> VirtualAgent:
        """Implements ``ElectionFiles``, too."""
        return self

    @property
    def services(self) -> VirtualAgent:
        """Implements ``ServicePorts``, too."""
        return self

    def monotonic(self) -> float:
        return self.site.monotonic(self._world.now)

    def unix(self) -> float:
        return self._world.unix() + self.site.unix_offset_s

    def to_controller(self, message: m.ToController) -> None:
        self._world.watch.says(self, message)
        if isinstance(message, m.RanksStopped):
            self._world.watch.stopped(self)
        self._world.on_message(self, True, message)
        connection = self.connection
        if connection is not None:
            copy = m.to_controller.decode(m.to_controller.encode(message))
            self._world.network.to_host(connection, lambda host: host.event(lambda: host.host.heard(copy, connection)))

    def follow(self, record: EpochRecord) -> None:
        self._world.watch.follows(self, record.epoch, record.endpoint)
        self.connection = self._world.network.connect(self, record.endpoint)

    def contact(self, node: str, endpoint: str) -> None:
        self.connection = self._world.network.connect(self, endpoint)

    def to_caller(self, node: str, message: m.ToAgent) -> None:
        self.host.say_to(node, message)

    def become_controller(self, term: Term) -> None:
        self._world.watch.leads(self, term.epoch)
        self.host.begin(term)

    def step_down(self, reason: str) -> None:
        self.host.step_down(reason)

    def scan_epochs(self) -> None:
        directory = self._world.directory

        def question() -> tuple[EpochRecord | None, int | None, tuple[str, int] | None]:
            record = max(directory.epochs, key=lambda known: known.epoch, default=None)
            epoch, pulse = directory.pulse
            return record, pulse if record is not None and record.epoch == epoch else None, directory.said

        def answer(reply: tuple[EpochRecord | None, int | None, tuple[str, int] | None] | None) -> None:
            if reply is None:
                self.core.storage_failed()
            else:
                self.core.scanned(*reply)

        self._world.storage.ask(self, question, answer)

    def claim_epoch(self, epoch: int) -> None:
        record = EpochRecord(epoch, self.node, self.endpoint, JOB)

        def answer(won: bool | None) -> None:
            if won is None:
                self.core.storage_failed()
            else:
                self.core.claimed(epoch, won)

        self._world.storage.ask(self, lambda: self._world.directory.claim_epoch(record), answer)

    def claim_witness(self, witness: str) -> None:
        def answer(holder: str | None) -> None:
            if holder is None:
                self.core.storage_failed()
            else:
                self.core.witness_claimed(witness, holder)

        self._world.storage.ask(self, lambda: self._world.directory.claim_witness(witness, self.node), answer)

    def abandon(self, epoch: int, reason: str) -> None:
        directory = self._world.directory

        def question() -> tuple[str, int] | None:
            directory.write_verdict({"verdict": "quorum_lost", "exit_code": 1, "reason": reason, "epoch": epoch})
            return directory.said

        def answer(said: tuple[str, int] | None) -> None:
            if said is not None:
                self.core.abandoned(*said)

        self._world.storage.ask(self, question, answer)

    def keep_vote_record(self, vote_record: VoteRecord) -> None:
        if vote_record.promised != (self.site.vote_record.promised if self.site.vote_record else 0):
            self._world.watch.promises(self.node, vote_record.promised)
        self.site.vote_record = vote_record

    def stop_ranks(self, how: StopHow, keep_stores_from: int) -> None:
        self.copies.give_up()
        gone, spawner = self.processes.doom(self.processes.reentry.keep(how.keep)), self.spawner
        self._stops += 1
        number = self._stops

        def stopped() -> None:
            if number == self._stops:  # another order replaces this one
                gone()
                if spawner == self.spawner:
                    self.event(self.processes.all_stopped)

        heeds_s = 0.0 if how.for_good else min(how.grace_s, self.site.heeds_s)
        self._world.after(heeds_s + self.site.stop_s, stopped)

    def judge(self, cause: m.Cause | None) -> None:
        self.judged.append(cause)

    def terminate_ranks(self) -> None:
        local = self.core.ranks.local
        for local_rank in local.ranks if local else ():
            self._world.after(0.1, lambda local_rank=local_rank: self.rank_ends(local_rank, None, 15, ""))  # type: ignore[misc]

    def restart_rank(self, local: LocalRound, local_rank: int) -> None:
        self._world.after(FORK_S, lambda: self.event(lambda: self.processes.again(local, local_rank)))

    def look_at_ranks(self, message: m.LookAtRanks) -> None:
        number = message.look
        local = self.core.ranks.local
        training = self._world.trainings.get(life_of(local)) if local is not None else None
        if local is not None and training is not None:
            sights = tuple(training.sight(rank) for rank in local.ranks.values())
            self._world.after(0.1, lambda: self.event(lambda: self.core.ranks.ranks_seen(number, sights)))

    def strike(self, message: m.DrillStrike) -> None:
        raise AssertionError("the faults of virtual hosts are the world's")

    def probe(self, message: m.BeginProbe | m.EndProbe) -> None:
        raise AssertionError("virtual hosts have probers of their own")

    def calls(self) -> int:
        local = self.core.ranks.local
        training = self._world.trainings.get(life_of(local)) if local is not None else None
        return -1 if training is None or not training.script.shows_calls else 2 * training.step

    def memory(self) -> tuple[int, str]:
        return self.site.memory_level, "memory: 97 % of 1 TiB in use" if self.site.memory_level else ""

    def open_store(self, round_number: int) -> None:
        def opened() -> None:
            self._world.ports += 1
            self.stores.add(self._world.ports)
            self.core.ranks.store_ready(round_number, self._world.ports)

        self._world.after(0.01, lambda: self.event(opened))

    def spawn(self, local: LocalRound, start: m.Start) -> None:
        ours = {rank.rank for rank in local.ranks.values()}
        wanted = [fetch for fetch in start.fetches if fetch.rank in ours and fetch.endpoint]
        brought = self.processes.start(local, start, FORK_S, bool(wanted))
        if wanted:
            self.copies.bring(wanted, start, local, brought)

    def tell_rank(self, local_rank: int, message: rank_link.AgentMessage) -> None:
        self._world.tell_rank(self, local_rank, message)

    def persist(self, message: m.PersistStep, member: m.Member, world_size: int) -> None:
        self.copies.when_brought(message.step, lambda: self._write(message, member))
        if message.partner is not None:
            self.copies.keep(message, message.partner, world_size)

    def keep_ranks(self, local: LocalRound) -> bool:
        return self.processes.kept.begin(local)

    def save_last_step(self, local: LocalRound, worth: m.LastStep, ahead: bool = False) -> bool:
        return not ahead and self.processes.last_step.begin(local, worth)

    def keep_copies(self, message: m.KeepCopies, world_size: int) -> None:
        pass  # copies are whole ones here

    def _write(self, message: m.PersistStep, member: m.Member) -> None:
        world, site = self._world, self.site
        copies = [site.memory.get((rank, message.step)) for rank in member.ranks]
        site.pinned = message.step

        def write() -> None:
            site.pinned = -1
            if None in copies or (self.node, message.step) in world.saver_fails:
                error = "no space left on device"
                self.event(lambda: self.core.ranks.saves.persist_failed(message.round, message.step, error))
                return
            content = [[list(entry) for entry in copy.history] for copy in copies if copy is not None]
            named, disk = [RankRecord(rank, Extent(0, 0, 0), "") for rank in member.ranks], world.config.local_disks
            record = ShardRecord(member.node_rank, json.dumps(content), 0, "own", (*named,), "", self.node * disk)
            self.event(lambda: self.core.ranks.saves.persisted(message.round, message.step, record))

        world.storage.save(self, world.slow_savers.get(self.node, world.save_s), write)

    def commit(self, message: m.CommitStep) -> None:
        directory, ordered_at = self._world.directory, self._world.now

        def write() -> None:
            if self.is_fenced(message.epoch) or (message.epoch, message.round) < directory.newest_commit:
                why = "a newer epoch has begun"
                self.event(lambda: self.core.ranks.saves.persist_failed(message.round, message.step, why))
                return
            contents = {tuple(map(tuple, rank)) for record in message.records for rank in json.loads(record.file)}
            self._world.watch.commits(message.step, message.epoch, contents, self._world.now - ordered_at)
            directory.committed[message.step] = contents.pop()
            directory.newest_commit = (message.epoch, message.round)  # what earlier rounds staged is swept away
            directory.commit_times.append((self._world.now, message.step))
            self.event(lambda: self.core.ranks.saves.commit_done(message.round, message.step, 0.01))

        self._world.storage.save(self, 0.02, write)

    def is_fenced(self, epoch: int) -> bool:
        return self._world.directory.fence > epoch  # then the checkpoint engine refuses to commit

    def held(self) -> tuple[m.Held, ...]:
        self.processes.lend()
        return tuple(m.Held(rank, step, copy.world_size) for (rank, step), copy in sorted(self.site.memory.items(),
                     key=lambda item: item[0])) + self.copies.held()  # fmt: skip

    def copy_port(self) -> int:
        return self._world.copy_port

    def forget_snapshots_after(self, step: int, life: m.Life) -> None:
        for key in [key for key in self.site.memory if key[1] > step]:
            del self.site.memory[key]
        self.copies.begin(life, step)

    def record(self, kind: str, **fields: Any) -> None:
        self._world.record(kind, {"node": self.node, **fields})

    def keep(self, state: m.RoundState) -> None:
        self.site.kept = state

    def leave(self, verdict: str, exit_code: int) -> None:
        self._world.record("agent_ends", {"node": self.node, "verdict": verdict, "exit_code": exit_code})
        self.die()
        self._world.agents.pop(self.node, None)
        self._world.network.closed(self)
