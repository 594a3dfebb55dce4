"""One agent process: the real AgentCore and Controller, with virtual ports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilio_hpc.core import rank_link
from resilio_hpc.launch import messages as m
from resilio_hpc.launch.agent_core import AgentCore
from resilio_hpc.launch.controller import Controller
from resilio_hpc.launch.controller_state import Action, AskPast, Clock, Finish, Past, Record, Send
from resilio_hpc.launch.local_round import LocalRound
from resilio_hpc.launch.succession import EpochRecord, Succession

if TYPE_CHECKING:
    from virtual_cluster.world import Site, World

JOB = "job"
FORK_S = 0.02
STOP_S = 0.02


class VirtualAgent:
    """Implements ``Ports`` and what ``ControllerHost`` does for the controller."""

    def __init__(self, world: World, site: Site) -> None:
        self.node = site.name
        self.site = site
        self.alive = True
        self.stores: set[int] = set()  # ports
        self.follows = ""
        self.controller: Controller | None = None
        self.said: list[m.ToController] = []
        self.heard: list[m.ToAgent] = []
        self._world = world
        self._rounds: set[int] = set()  # rounds whose ranks are alive here
        self._life = 0  # grows when ranks are stopped: what was on its way for them is void
        self._verdict: dict[str, Any] | None = None
        self._next_verdict = 0.0
        self._next_pulse = 0.0
        timeout = world.config.heartbeat_timeout_s
        succession = Succession(self.node, JOB, world.config.expected, timeout, world.now)
        incarnation = f"{self.node}.{site.incarnations}"
        hello = m.Hello(self.node, incarnation, self.node, self.node, world.slots, last=site.kept)
        self.core = AgentCore(hello, succession, self, timeout)

    def rank_rounds(self) -> set[int]:
        return self._rounds

    def die(self) -> None:
        self.alive = False
        self._ranks_gone()

    def _ranks_gone(self) -> None:
        self._life += 1
        for number in self._rounds:
            self._world.trainings[number].left(self.node)
        self._rounds = set()

    def tick(self) -> None:
        if not self.alive:
            return
        if self.controller is not None:
            self._carry_out(self.controller.tick())
            self._host_tick()
        if self.alive:
            self.core.tick()

    def rank_ends(self, local_rank: int, exit_code: int | None, signal: int | None, message: str) -> None:
        """A rank exits by itself."""
        local = self.core.local
        if self.alive and local is not None:
            if exit_code != 0:
                self._world.trainings[local.number].broken = True
            self.core.rank_exited(local_rank, exit_code, signal, self._world.unix(), (message, ""))
            if all(rank.done for rank in local.ranks.values()):
                self._rounds.discard(local.number)

    # -- the controller's host ---------------------------------------------------------------------------------

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._send(action.node, action.message)
            elif isinstance(action, Record):
                self._world.record(action.kind, action.fields)
            elif isinstance(action, AskPast):
                self._ask_past()
            else:
                self._finish(action)

    def _send(self, node: str, message: m.ToAgent) -> None:
        world = self._world

        def arrive() -> None:
            agent = world.agents.get(node)
            if agent is not None and agent.follows == self.node:
                agent.heard.append(message)
                agent.core.controller_said(message)

        world.deliver(self.node, node, arrive)

    def _superseded(self, newest: int) -> bool:
        if self.controller is None or newest <= self.controller.epoch:
            return False
        self._world.record("stepped_down", {"node": self.node, "newer": newest})
        self.controller = None
        self.core.connection_lost()
        return True

    def _newest(self) -> int:
        epochs = self._world.directory.epochs
        return epochs[-1].epoch if epochs else 0

    def _ask_past(self) -> None:
        directory = self._world.directory

        def question() -> tuple[int, Past]:
            said = directory.verdict
            verdict = (said["verdict"], said["exit_code"]) if said is not None else None
            return self._newest(), Past(tuple(sorted(directory.committed)), directory.last_round, verdict)

        def answer(reply: tuple[int, Past] | None) -> None:
            if reply is None:
                self._world.after(1.0, self._ask_past)
            elif self.controller is not None and not self._superseded(reply[0]):
                self._carry_out(self.controller.inform(reply[1]))

        self._world.ask(self, question, answer)

    def _finish(self, finish: Finish) -> None:
        self._verdict = {
            "verdict": finish.verdict, "exit_code": finish.exit_code, "reason": finish.reason, **finish.fields,
        }  # fmt: skip

    def _host_tick(self) -> None:
        world, controller = self._world, self.controller
        if self._verdict is not None and world.now >= self._next_verdict:
            self._next_verdict = world.now + 1.0
            world.ask(self, self._store_verdict, self._verdict_stored)
        if controller is not None and world.now >= self._next_pulse:
            self._next_pulse = world.now + 0.5
            world.ask(self, self._store_pulse, lambda newest: newest is not None and self._superseded(newest))

    def _store_pulse(self) -> int:
        if self.controller is not None and self._newest() <= self.controller.epoch and self.controller.leads():
            self._world.directory.pulse = (self.controller.epoch, self._world.directory.pulse[1] + 1)
        return self._newest()

    def _store_verdict(self) -> int:
        newest = self._newest()
        if self._verdict is not None and newest <= self._verdict["epoch"]:
            self._world.directory.verdict = self._verdict
        return newest

    def _verdict_stored(self, newest: int | None) -> None:
        if newest is None or self._verdict is None or self._superseded(newest):
            return
        self._verdict = None
        if self.controller is not None:
            self._carry_out(self.controller.verdict_written())

    # -- ports -------------------------------------------------------------------------------------------------

    def monotonic(self) -> float:
        return self._world.now

    def unix(self) -> float:
        return self._world.unix()

    def to_controller(self, message: m.ToController) -> None:
        self.said.append(message)
        world, target = self._world, self.follows

        def arrive() -> None:
            host = world.agents.get(target)
            if host is None or host.controller is None:
                return
            if not host._superseded(getattr(message, "epoch", 0)):
                host._carry_out(host.controller.handle(m.to_controller.decode(m.to_controller.encode(message))))

        world.deliver(self.node, target, arrive)

    def follow(self, record: EpochRecord) -> None:
        self.follows = record.node

    def become_controller(self, epoch: int) -> None:
        clock = Clock(lambda: self._world.now, self._world.unix)
        self.controller = Controller(self._world.config, epoch, self.node, clock)
        self._verdict = None
        self._ask_past()

    def scan_epochs(self) -> None:
        directory = self._world.directory

        def question() -> tuple[EpochRecord | None, int | None]:
            record = directory.epochs[-1] if directory.epochs else None
            epoch, pulse = directory.pulse
            return record, pulse if record is not None and record.epoch == epoch else None

        def answer(reply: tuple[EpochRecord | None, int | None] | None) -> None:
            if reply is None:
                self.core.storage_failed()
            else:
                self.core.scanned(*reply)

        self._world.ask(self, question, answer)

    def claim_epoch(self, epoch: int) -> None:
        record = EpochRecord(epoch, self.node, self.node, JOB)
        epochs = self._world.directory.epochs

        def question() -> bool:
            if any(known.epoch == epoch for known in epochs):
                return False
            epochs.append(record)
            return True

        def answer(won: bool | None) -> None:
            if won is None:
                self.core.storage_failed()
            else:
                self.core.claimed(epoch, won, record)

        self._world.ask(self, question, answer)

    def stop_ranks(self, signal_first: bool, grace_s: float, keep_stores_from: int) -> None:
        self._ranks_gone()
        self._world.after(STOP_S, lambda: self.core.all_stopped() if self.alive else None)

    def terminate_ranks(self) -> None:
        local = self.core.local
        for local_rank in local.ranks if local else ():
            self._world.after(0.1, lambda local_rank=local_rank: self.rank_ends(local_rank, None, 15, ""))  # type: ignore[misc]

    def open_store(self, round_number: int) -> None:
        def opened() -> None:
            if self.alive:
                self._world.ports += 1
                self.stores.add(self._world.ports)
                self.core.store_ready(round_number, self._world.ports)

        self._world.after(0.01, opened)

    def spawn(self, local: LocalRound, start: m.Start) -> None:
        world, life = self._world, self._life
        self._rounds.add(local.number)
        training = world.training(start)

        def forked() -> None:
            if self.alive and life == self._life and world.spawns:
                self.core.ranks_started(local.number, FORK_S, "fork")
                training.joined(self, local)

        world.after(FORK_S, forked)

    def tell_rank(self, local_rank: int, message: rank_link.AgentMessage) -> None:
        self._world.tell_rank(self, local_rank, message)

    def persist(self, message: m.Persist, member: m.Member, world_size: int) -> None:
        world, site = self._world, self.site
        ranks = range(member.first_rank, member.first_rank + member.local_world_size)
        copies = [site.memory.get((rank, message.step)) for rank in ranks]
        site.pinned = message.step

        def write() -> None:
            if not self.alive:
                return
            site.pinned = -1
            if None in copies or (self.node, message.step) in world.saver_fails:
                self.core.persist_failed(message.round, message.step, "no space left on device")
            else:
                content = [[list(entry) for entry in copy.history] for copy in copies if copy is not None]
                self.core.persisted(message.round, message.step, {"node": self.node, "content": content})

        world.after(world.slow_savers.get(self.node, world.save_s), write)

    def commit(self, message: m.Commit) -> None:
        directory = self._world.directory

        def write() -> None:
            if not self.alive or self._newest() > message.epoch:
                return
            contents = {tuple(map(tuple, rank)) for record in message.records for rank in record["content"]}
            assert len(contents) == 1, f"step {message.step} is committed from different lives: {contents}"
            directory.committed[message.step] = contents.pop()
            directory.commit_times.append((self._world.now, message.step))
            self.core.commit_done(message.step, 0.01)

        self._world.after(0.02, write)

    def held(self) -> tuple[m.Held, ...]:
        return tuple(m.Held(rank, step, copy.world_size) for (rank, step), copy in sorted(self.site.memory.items(),
                     key=lambda item: item[0]))  # fmt: skip

    def forget_snapshots_after(self, step: int) -> None:
        for key in [key for key in self.site.memory if key[1] > step]:
            del self.site.memory[key]

    def record(self, kind: str, **fields: Any) -> None:
        self._world.record(kind, {"node": self.node, **fields})

    def keep(self, state: m.RoundState) -> None:
        self.site.kept = state

    def leave(self, verdict: str, exit_code: int) -> None:
        self._world.record("agent_ends", {"node": self.node, "verdict": verdict, "exit_code": exit_code})
        self.alive = False
        self._ranks_gone()
        self._world.agents.pop(self.node, None)
        for agent in self._world.agents.values():
            if agent.follows == self.node:
                self._world.after(0.001, agent.core.connection_lost)
