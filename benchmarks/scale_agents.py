"""A simulated agent: the real AgentCore on real authenticated sockets, without ranks. See ``scale_roles.py``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from resilio_hpc.core import rank_link, wire
from resilio_hpc.core.errors import WireError
from resilio_hpc.launch.agent.decisions.agent_core import AgentCore
from resilio_hpc.launch.controller.facts.rendezvous import NodeCounts
from resilio_hpc.launch.controller.facts.state import ControllerConfig
from resilio_hpc.launch.controller.host import ControllerHost
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.vote import EpochRecord, Term, VoteRecord
from resilio_hpc.launch.rundir.storage import Storage
from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.rank_owner import StopHow
from scale_process import JOB, Process, tell

Kept = TypeVar("Kept")
TICKS_PER_S = 20_000  # of the whole crowd: on a cluster each agent has a machine of its own
STEP_S = 0.2


class SimulatedAgent:
    """Implements ``agent_ports.Ports``: its ranks start and stop at once and do steps."""

    def __init__(self, process: Process, node: str, heard: Callable[[str, m.ToAgent], None]) -> None:
        self.node = node
        self.process = process
        self.gone = False
        self.host: ControllerHost | None = None
        self.storage: Storage | None = None
        self._heard = heard
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._fds: list[int] = []
        self._incarnation = os.urandom(4).hex()
        self._calls = 0
        self._trains = -1  # the round whose ranks do steps
        self.core: AgentCore

    def begin(self, endpoint: str) -> None:
        """Begin, as the agent's process does."""
        plan = self.process.plan
        hello = m.Hello(self.node, self._incarnation, 0, endpoint, "127.0.0.1", 1)
        vote_record = self._kept("vote_record", VoteRecord) or self.process.vote_record
        hello = msgspec.structs.replace(hello, last=self._kept("state", m.RoundState))
        self.core = AgentCore(hello, JOB, vote_record, self, plan.timeout_s)
        self.tick()

    def tick(self) -> None:
        """As the real agent's loop does, which also wakes up for messages; among thousands not as often."""
        if not self.gone:
            if (
                local := self.core.ranks.local
            ) is not None and self._trains == local.number:  # a hang would be looked for
                self.core.ranks.rank_said(
                    local.number, 0, rank_link.StepDone(int(time.monotonic() / STEP_S), time.time())
                )
            self.core.tick()
            pause_s = 0.0
            if self.host is None:  # with a controller there is nothing to do between two Heartbeats
                pause_s = self.core.beat_interval_s if self.core.in_contact else self.process.plan.agents / TICKS_PER_S
            self.process.loop.later(max(self.core.next_wakeup_s, pause_s), self.tick)

    def _train(self) -> None:
        """Do a step now and then: without any the run would be taken for one that hangs."""
        ranks = self.core.ranks
        if ranks.local is not None and self._trains == ranks.local.number:
            step = int(time.monotonic() / STEP_S)
            ranks.rank_said(ranks.local.number, 0, rank_link.StepDone(step, time.time()))

    def _soon(self, what: Callable[..., None], *arguments: Any) -> None:
        self.process.loop.later(0.0, lambda: what(*arguments))

    # -- the connection ----------------------------------------------------------------------------------------

    def follow(self, record: EpochRecord) -> None:
        """Connect to a controller."""
        self._hang_up()
        self._calls += 1
        name = f"{self.node}/{self._incarnation}/{self._calls}".encode()
        self._socket = wire.call(self.process.context, self.process.keys, record.endpoint, name)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        watch = self.process.loop.watch
        self._fds = [watch(self._socket, self._take), watch(self._monitor, self._watch_connection)]

    def contact(self, node: str, endpoint: str) -> None:
        """Connect to another agent because of an election."""
        self.follow(EpochRecord(0, node, endpoint, ""))

    def _hang_up(self) -> None:
        for fd in self._fds:
            self.process.loop.forget(fd)
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(0)
        self._fds, self._socket, self._monitor = [], None, None

    def _take(self) -> None:
        while self._socket is not None:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self.process.decode(frames[-1])
            except WireError as error:
                tell("undecodable", why=str(error))
                continue
            self.core.controller_said(message)
            self._heard(self.node, message)

    def _watch_connection(self) -> None:
        for frames in wire.receive_all(self._monitor) if self._monitor is not None else ():
            if int.from_bytes(frames[0][:2], "little") == zmq.EVENT_DISCONNECTED:
                self.core.connection_lost()

    def to_controller(self, message: m.ToController) -> None:
        """Send to the controller that we follow."""
        if self._socket is not None:
            wire.send(self._socket, [m.to_controller.encode(message)])
            self.process.loop.stirred(self._fds[0])

    def to_caller(self, node: str, message: m.ToAgent) -> None:
        """Answer an agent that called this one: only those with a host are ever called."""
        assert self.host is not None
        self.host.say_to(node, message)

    # -- the run directory -------------------------------------------------------------------------------------

    def scan_epochs(self) -> None:
        """Node agents ask their storage child; the crowd shares one reader."""
        if self.storage is None:
            self._soon(lambda: self.core.scanned(*self.process.scan()))
        else:
            self.storage.request("scan", self._scanned)

    def _scanned(self, reply: dict[str, Any] | None) -> None:
        if reply is None:
            self.core.storage_failed()
        else:
            self.core.scanned(EpochRecord(**reply["record"]) if reply["record"] else None, reply["pulse"])

    def claim_epoch(self, epoch: int) -> None:
        """Only an agent with a host may win; no other should come to that."""
        if self.storage is None or self.host is None:
            tell("unwanted claim", node=self.node, epoch=epoch)
            self._soon(self.core.claimed, epoch, False)
            return
        record = EpochRecord(epoch, self.node, f"127.0.0.1:{self.host.port}", JOB)

        def answer(reply: dict[str, Any] | None) -> None:
            if reply is None:
                self.core.storage_failed()
            else:
                self.core.claimed(epoch, reply["won"])

        self.storage.request("claim", answer, record=msgspec.structs.asdict(record))

    def claim_witness(self, witness: str) -> None:
        """As the real agent does: votes that are slow to come in may stand at half for a while."""
        assert self.storage is not None
        tell("witness asked", node=self.node)

        def answer(reply: dict[str, Any] | None) -> None:
            if reply is None:
                self.core.storage_failed()
            else:
                self.core.witness_claimed(witness, reply["holder"])

        self.storage.request("witness", answer, witness=witness, node=self.node)

    def abandon(self, epoch: int, reason: str) -> None:
        """Most of the cluster is gone: the measurement has failed."""
        tell("abandoned", node=self.node, why=reason)
        self.gone = True

    def keep_vote_record(self, vote_record: VoteRecord) -> None:
        """As the real agent does."""
        self._keep("vote_record", vote_record)

    def keep(self, state: m.RoundState) -> None:
        """As the real agent does."""
        self._keep("state", state)

    def _keep(self, name: str, value: msgspec.Struct) -> None:
        if self.host is not None:  # the crowd's own disks are not what is measured
            self._path(name).write_bytes(msgspec.json.encode(value))

    def _kept(self, name: str, kind: type[Kept]) -> Kept | None:
        path = self._path(name)
        return msgspec.json.decode(path.read_bytes(), type=kind) if self.host is not None and path.exists() else None

    def _path(self, name: str) -> Path:
        return self.process.run.path.parent / f"{self.node}.{name}"

    def step_down(self, reason: str) -> None:
        """Our controller is none any more."""
        assert self.host is not None
        self.host.step_down(reason)

    def peer_said(self, message: m.NoLeader | m.Vote) -> None:
        """Another agent called this one because of an election."""
        self.core.peer_said(message)

    def taken_for_controller(self, message: m.Hello | m.Heartbeat) -> None:
        """Another agent follows us, though there is no controller here."""
        self.core.taken_for_controller(message)

    def stepped_down(self, epoch: int, since: float, outvoted: bool) -> None:
        """There is no controller here any more."""
        tell("stepped down", node=self.node)
        self.core.stepped_down(epoch, since, outvoted)

    def become_controller(self, term: Term) -> None:
        """We were elected."""
        assert self.host is not None
        plan = self.process.plan
        config = ControllerConfig(NodeCounts(1, plan.agents), plan.nodes, heartbeat_timeout_s=plan.timeout_s)
        tell("controller", node=self.node, epoch=term.epoch)
        self.host.begin(config, term)

    # -- ranks -------------------------------------------------------------------------------------------------

    def stop_ranks(self, how: StopHow, keep_stores_from: int) -> None:
        """They are gone at once."""
        self._soon(self.core.ranks.all_stopped)

    def judge(self, cause: m.Cause | None) -> None:
        """There is no console."""

    def terminate_ranks(self) -> None:
        """There are none."""

    def restart_rank(self, local: LocalRound, local_rank: int) -> None:
        """No rank fails here."""

    def memory(self) -> tuple[int, str]:
        """As usual."""
        return 0, ""

    def calls(self) -> int:
        """No library is watched."""
        return -1

    def look_at_ranks(self, message: m.LookAtRanks) -> None:
        """No rank hangs."""

    def strike(self, message: m.DrillStrike) -> None:
        """No drill is ordered."""

    def probe(self, message: m.BeginProbe | m.EndProbe) -> None:
        """No node is tested."""

    def open_store(self, round_number: int) -> None:
        """Open it at once."""
        self._soon(self.core.ranks.store_ready, round_number, 29400)

    def spawn(self, local: LocalRound, start: m.Start) -> None:
        """One rank, which completes its first step at once."""

        def first_step() -> None:
            self.core.ranks.ranks_started(local.number, 0.0, "fork")
            rank = local.ranks[0].rank
            self.core.ranks.rank_said(local.number, 0, rank_link.Attach(rank, 0, local.number, os.getpid()))
            self.core.ranks.rank_said(local.number, 0, rank_link.StepDone(1, time.time()))
            self._trains = local.number

        self._soon(first_step)

    def tell_rank(self, local_rank: int, message: rank_link.AgentMessage) -> None:
        """No process listens."""

    def keep_ranks(self, local: LocalRound) -> bool:
        return False

    def save_last_step(self, local: LocalRound, worth: m.LastStep, ahead: bool = False) -> bool:
        return False

    def keep_copies(self, message: m.KeepCopies, world_size: int) -> None:
        pass

    def persist(self, message: m.PersistStep, member: m.Member, world_size: int) -> None:
        """No snapshot was taken, so no process asks."""
        raise AssertionError("no snapshot to persist")

    def commit(self, message: m.CommitStep) -> None:
        """See persist."""
        raise AssertionError("no checkpoint to commit")

    def held(self) -> tuple[m.Held, ...]:
        """No snapshots."""
        return ()

    def copy_port(self) -> int:
        """None is fetched."""
        return 0

    def forget_snapshots_after(self, step: int, life: m.Life) -> None:
        """No snapshots."""

    def record(self, kind: str, **fields: Any) -> None:
        """Only the controller's ledger is kept."""

    def leave(self, verdict: str, exit_code: int) -> None:
        """Leave the run, which is over."""
        tell("left", node=self.node, verdict=verdict)
        self.gone = True

    @property
    def files(self) -> SimulatedAgent:
        """Implements ``ElectionFiles``, too."""
        return self

    @property
    def services(self) -> SimulatedAgent:
        """Implements ``ServicePorts``, too."""
        return self

    def monotonic(self) -> float:
        """Seconds."""
        return time.monotonic()

    def unix(self) -> float:
        """Seconds."""
        return time.time()
