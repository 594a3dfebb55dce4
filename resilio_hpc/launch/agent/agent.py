"""The agent process: one per node, owns everything local. ``python -m resilio_hpc.launch.agent.agent SETTINGS``.

A single thread polls its sockets and children and lets the pure ``AgentCore`` decide. It outlives its ranks; ranks do
not outlive it; snapshots in shared memory outlive both.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from typing import Any

import zmq

from resilio_hpc.ckpt.coordination.coordinator import LOCAL_VARIABLE, PEER_DISKS_VARIABLE
from resilio_hpc.ckpt.restore import shared_blocks
from resilio_hpc.core import rank_link, wire
from resilio_hpc.core.errors import LaunchError, ResilioError, WireError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.core.ledger import Ledger
from resilio_hpc.events.event_text import words
from resilio_hpc.launch.agent.agent_core import AgentCore
from resilio_hpc.launch.agent.agent_files import AgentFiles
from resilio_hpc.launch.agent.device_eviction import DeviceEviction
from resilio_hpc.launch.agent.disk_link import DiskLink
from resilio_hpc.launch.agent.local_snapshots import LocalSnapshots
from resilio_hpc.launch.agent.own_job import OwnJob
from resilio_hpc.launch.agent.partner_copies import PartnerCopies
from resilio_hpc.launch.agent.read_ahead_link import ReadAheadLink
from resilio_hpc.launch.chain import orphaned_job
from resilio_hpc.launch.config.agent_settings import AGENT_FAILED, AGENT_LIVES, AgentSettings
from resilio_hpc.launch.consensus.connections import Names
from resilio_hpc.launch.controller.host import ControllerHost
from resilio_hpc.launch.notify.notify import Notifier
from resilio_hpc.launch.process import announce, process_tree
from resilio_hpc.launch.process.helper_watch import HelperWatch
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.membership import Membership, first_membership
from resilio_hpc.launch.protocol.vote import EpochRecord, Term, VoteRecord
from resilio_hpc.launch.rundir import identity, node_directories, stale_directories
from resilio_hpc.launch.rundir.io_worker import Storage
from resilio_hpc.launch.rundir.node_memory import NodeMemory
from resilio_hpc.launch.workers import open_files
from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.mpi.ranks import local_ranks
from resilio_hpc.launch.workers.rank_owner import StopHow

SIGNALS = {
    signal.SIGUSR1: "USR2", signal.SIGUSR2: "USR2",  # sbatch --signal: either means that the time limit is near
    signal.SIGTERM: "TERM", signal.SIGINT: "INT", signal.SIGHUP: "TERM",
}  # fmt: skip
PREDECESSOR_DIES_S = 3.0
ABANDON_S = 300.0  # without a quorum for so long: what is left of the job ends


class AnotherLives(LaunchError):
    """An agent of this run lives on this node already."""


class Agent(AgentFiles):
    """Implements ``agent_core.Ports`` with real sockets and processes."""

    say = staticmethod(announce.say)

    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings
        self.open_files = open_files.raise_limit()
        self.run, targets = identity.identify(settings)
        self.local_dir = node_directories.local(self.run.run_id, settings.node)
        self.arena_dir = node_directories.arenas(self.run.run_id, settings.node)
        try:
            self.held_directories = stale_directories.Held([self.local_dir, self.arena_dir], PREDECESSOR_DIES_S)
        except BlockingIOError:
            raise AnotherLives(f"another agent of run {self.run.run_id} lives on {settings.node}") from None
        stale_directories.sweep([self.local_dir.parent, self.arena_dir.parent])
        token = f"{self.run.run_id}:{settings.node}"
        process_tree.become_subreaper()
        process_tree.sweep(token)  # ranks of a predecessor that was killed
        self.exit_code: int | None = None
        self.counters = wire.Counters()
        self.keys = wire.Keys.derive(self.run.secret)
        self.context: zmq.Context[Any] = zmq.Context()
        self.gatekeeper = wire.Gatekeeper(self.context, self.keys, self.counters)
        spool = self.local_dir / "spool"
        self.ledger = Ledger(spool / "ledger", f"{settings.job}-{settings.node}")
        self.storage = Storage(self.run.path, spool, settings.job, self.run.run_id)
        self.memory = NodeMemory(self.local_dir, settings.job, settings.begins)
        self.notifier = Notifier(self.run, settings.job, self.ledger.append, targets, settings.cwd)
        self.host = ControllerHost(
            self.context, self.keys, settings.address, self.ledger, self.storage, self.counters, self.say, self,
            settings.job, self.notifier.take, settings.clock_ahead_s(time.time()),
        )  # fmt: skip
        incarnation = os.urandom(4).hex()
        self._own_job = OwnJob(settings, self.storage, self.host.clock_ahead_s)
        self._names = Names(settings.node)
        self.snapshots = LocalSnapshots(self)
        self.devices = DeviceEviction(self)
        self.disks = DiskLink(self)
        slots = self.devices.slots
        hello = m.Hello(
            settings.node, incarnation, 0, f"{settings.address}:{self.host.port}", settings.address, slots,
            topology=os.environ.get("SLURM_TOPOLOGY_ADDR", ""), last=self.memory.kept("state", m.RoundState),
            evicted=len(self.devices.evicted), disk_port=self.disks.port,
        )  # fmt: skip
        self.core: AgentCore = AgentCore(
            hello, settings.job, self._vote_record(), self, settings.options.heartbeat_timeout_s, settings.join,
            min(ABANDON_S, settings.options.join_timeout_s), settings.begins, settings.graces(os.environ),
            settings.options.stop_grace_s,
        )  # fmt: skip
        self.copies = PartnerCopies(self)
        self.read_ahead = ReadAheadLink(self)
        os.environ[LOCAL_VARIABLE] = settings.options.local_checkpoints  # ranks inherit both
        os.environ[PEER_DISKS_VARIABLE] = str(self.disks.known)
        self.ranks = local_ranks(self, token, spool)
        self.helpers = HelperWatch(self._helper_stopped, lambda: self.snapshots.saver.paused_pids)
        self.caller: zmq.Socket[bytes] | None = None
        self.monitor: zmq.Socket[bytes] | None = None
        if settings.stop:
            self.core.warned(settings.stop, self._own_job.lasts_s(settings.stop))
        self._signals = self._catch_signals()
        self.ledger.append("agent", node=settings.node, incarnation=incarnation, pid=os.getpid(), slots=slots)

    def _catch_signals(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        for number in SIGNALS:
            signal.signal(number, lambda _number, _frame: None)  # the wake-up descriptor tells which
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        self._signal_writer = theirs
        return ours

    def _vote_record(self) -> VoteRecord:
        expected = () if self.settings.join else self.settings.expected
        first = VoteRecord(first_membership(expected) if expected else Membership())
        return self.memory.kept("vote_record", VoteRecord) or first

    # -- the loop ----------------------------------------------------------------------------------------------

    def run_forever(self) -> int:
        """Until End. Returns the exit code."""
        self.ranks.start()
        self.copies.start()
        self.disks.start()
        self.read_ahead.guess()
        while self.exit_code is None:
            self._poll()
            for part in (
                self.host, self.notifier, self.core, self.ranks, self.snapshots.saver, self.copies, self.disks,
                self.held_directories, self.read_ahead, self.devices, self.helpers,
            ):  # fmt: skip
                part.tick()
            self._own_job.tick(self.core)
        return self._close()

    def _poll(self) -> None:
        poller = zmq.Poller()
        for watched in (self.host.socket, self.gatekeeper.socket, self.caller, self.monitor):
            if watched is not None:
                poller.register(watched, zmq.POLLIN)
        helpers = {child: child.fileno() for child in (self.snapshots.saver, self.copies.link)}
        descriptors = {self._signals.fileno(), self.storage.fileno(), *self.ranks.filenos(), *self.devices.filenos()}
        for descriptor in descriptors | {known for known in helpers.values() if known is not None}:
            poller.register(descriptor, zmq.POLLIN)
        full = self.storage.full_fileno
        for waits in (full, *(child.full_fileno for child in helpers)):
            if waits is not None:
                poller.register(waits, zmq.POLLOUT)
        ready = dict(poller.poll(int(self.core.next_wakeup_s * 1000)))
        if self.gatekeeper.socket in ready:
            self.gatekeeper.serve()
        if self._signals.fileno() in ready:
            self._on_signals()
        if self.storage.fileno() in ready or full in ready:
            self.storage.serve()
        for child, serve in ((self.snapshots.saver, self.snapshots.serve), (self.copies.link, self.copies.serve)):
            if helpers[child] in ready:
                serve()
            if child.full_fileno in ready:
                child.push()
        self.ranks.serve({fd for fd in ready if isinstance(fd, int)})
        if self.host.socket in ready:
            self.host.serve()
        if self.monitor is not None and self.monitor in ready:
            self._on_monitor()
        if self.caller is not None and self.caller in ready:
            self._on_controller()

    def _on_signals(self) -> None:
        for number in self._signals.recv(4096):
            name = SIGNALS.get(signal.Signals(number))
            if name:
                self.ledger.append("signal", signal=name, node=self.settings.node)
                self.core.warned(name, self._own_job.lasts_s(name))

    def _on_controller(self) -> None:
        caller = self.caller
        assert caller is not None
        for frames in wire.receive_all(caller):
            try:
                message = m.to_agent.decode(frames[-1])
            except WireError:
                self.counters.dropped += 1
                continue
            self.core.controller_said(message)
            if self.caller is not caller:
                return  # it was the last word of one that we have hung up on

    def _on_monitor(self) -> None:
        assert self.monitor is not None
        for frames in wire.receive_all(self.monitor):
            event = int.from_bytes(frames[0][:2], "little")
            if event == zmq.EVENT_DISCONNECTED:
                self.core.connection_lost()
                return

    def _close(self) -> int:
        """Everything of this node goes, the ledger is drained."""
        self.ranks.close()
        self.snapshots.close()
        self.copies.close()
        self.disks.close()
        self.devices.close()
        self.read_ahead.close()
        self._hang_up()
        self.notifier.close()
        if not self.storage.close(10.0):
            identity.forget(self.local_dir)
            self.say(f"not all logs of {self.settings.node} reached {self.run.path}; the rest is in {self.local_dir}")
        else:
            stale_directories.remove(self.local_dir)
        stale_directories.remove(self.arena_dir)
        shared_blocks.sweep()
        self.context.destroy(linger=200)
        return self.exit_code or 0

    def _helper_stopped(self, name: str, pid: int, action: str) -> None:
        self.record("helper_stopped", helper=name, pid=pid, action=action)
        self.say(words("helper_stopped", {"node": self.settings.node, "helper": name, "pid": pid, "action": action}))

    @property
    def may_be_last(self) -> bool:
        """Whether our job may have lost its batch host, and with it whoever closes it."""
        settings = self.settings
        if settings.join or settings.supervisor_pid:
            return False
        return self.abandoned or settings.expected[0] in self.host.absent  # the batch host is the first node

    # -- ports -------------------------------------------------------------------------------------------------

    def monotonic(self) -> float:
        """Seconds of a clock that does not jump."""
        return time.monotonic()

    def unix(self) -> float:
        """Seconds since 1970, for what is written down."""
        return time.time()

    def to_controller(self, message: m.ToController) -> None:
        """Queue a message to the controller that we follow."""
        if isinstance(message, m.FirstStep):  # the restart is over
            self.snapshots.saver.resume()
        if self.caller is not None:
            wire.send(self.caller, [m.to_controller.encode(message)])

    def follow(self, record: EpochRecord) -> None:
        """Connect to a controller."""
        self._hang_up()
        self.caller = wire.call(self.context, self.keys, record.endpoint, self._names.next())
        self.monitor = self.caller.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def _hang_up(self) -> None:
        if self.caller is not None:
            self.caller.disable_monitor()
            self.caller.close(0)
            self.caller = self.monitor = None

    def contact(self, node: str, endpoint: str) -> None:
        """Connect to another agent because of an election."""
        self.follow(EpochRecord(0, node, endpoint, ""))

    def to_caller(self, node: str, message: m.ToAgent) -> None:
        """Queue a message to an agent that called this one."""
        self.host.say_to(node, message)

    def become_controller(self, term: Term) -> None:
        """We were elected."""
        self.host.begin(self.settings, term)

    def step_down(self, reason: str) -> None:
        """Our controller is none any more."""
        self.host.step_down(reason)

    def peer_said(self, message: m.NoLeader | m.Vote) -> None:
        """Another agent called this one because of an election."""
        self.core.peer_said(message)

    def taken_for_controller(self, message: m.Hello | m.Heartbeat) -> None:
        """Another agent follows us, though there is no controller here."""
        self.core.taken_for_controller(message)

    def stepped_down(self, epoch: int, since: float, outvoted: bool) -> None:
        """There is no controller here any more."""
        self.core.stepped_down(epoch, since, outvoted)

    def keep_vote_record(self, vote_record: VoteRecord) -> None:
        """Write to this node's disk, before anything else is said."""
        self.memory.keep("vote_record", vote_record)

    def stop_ranks(self, how: StopHow, keep_stores_from: int) -> None:
        """End all ranks and their descendants; nothing shall compete with their restart."""
        self.snapshots.ranks_stop()
        self.copies.give_up()
        self.devices.ranks_stop(how.for_good)
        self.ranks.stop(how, keep_stores_from)

    def terminate_ranks(self) -> None:
        """SIGTERM to ranks that do not know us; they end by themselves."""
        self.ranks.terminate()

    def open_store(self, round_number: int) -> None:
        """Open the rendezvous store of a round."""
        self.ranks.open_store(round_number)

    def spawn(self, local: LocalRound, start: m.Start) -> None:
        """Start the local ranks of a round, when their devices were looked at."""
        if not self.devices.holds(local, start):
            self.start_ranks(local, start)

    def start_ranks(self, local: LocalRound, start: m.Start) -> None:
        """Start them. Snapshots that they need and others have come meanwhile (RES-16)."""
        self.disks.begin(start)
        self.read_ahead.begin(local, start)
        if self.copies.fetch(local, start):
            self.ranks.spawn(local, start)

    def tell_rank(self, local_rank: int, message: rank_link.AgentMessage) -> None:
        """Send to an attached rank."""
        if self.core.local is not None:
            self.ranks.server.tell(self.core.local.number, local_rank, message)

    def persist(self, message: m.Persist, member: m.Member, world_size: int) -> None:
        """Write this node's file of a step, and copy the partner's snapshots of it."""
        self.copies.when_brought(message.step, lambda: self.snapshots.persist(message, member, world_size))
        self.copies.keep(message, world_size)

    def commit(self, message: m.Commit) -> None:
        """Write the manifest of a step."""
        self.snapshots.commit(message)

    def held(self) -> tuple[m.Held, ...]:
        """Whole snapshots in this node's memory, and copies of others'."""
        return self.snapshots.held() + self.copies.held()

    def copy_port(self) -> int:
        """Where other nodes may fetch them; 0: nowhere."""
        return self.copies.port

    def forget_snapshots_after(self, step: int, life: m.Life) -> None:
        """Drop snapshots of steps that will be computed anew, in that life."""
        self.snapshots.forget_after(step)
        self.copies.begin(life, step)

    def record(self, kind: str, **fields: Any) -> None:
        """Write to the ledger."""
        self.ledger.append(kind, node=self.settings.node, **{k: v for k, v in fields.items() if k != "node"})

    def keep(self, state: m.RoundState) -> None:
        """Remember on this node, for a successor of this very process."""
        self.memory.keep("state", state)

    def leave(self, verdict: str, exit_code: int) -> None:
        """End this process."""
        self.tell_supervisor(verdict, exit_code)
        self.ledger.append("agent_ends", node=self.settings.node, verdict=verdict)
        self.exit_code = 0  # an orderly end; the verdict file tells how the run fared, srun would only complain


def main(argv: list[str]) -> int:
    """Run an agent."""
    settings = AgentSettings.from_json(argv[0])
    if settings.supervisor_pid:
        process_tree.die_with_parent(settings.supervisor_pid)
    try:
        with open_files.limit_told():
            agent = Agent(settings.on_this_node(os.environ).with_what_is_installed().reachable(os.environ))
            code = agent.run_forever()
        if agent.may_be_last:
            orphaned_job.close_job(agent.run.path, settings.job)
        return code
    except ResilioError as error:
        print(f"resilio-launch: error: {printable(str(error), 2000)}", file=sys.stderr)
        return AGENT_LIVES if isinstance(error, AnotherLives) else AGENT_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
