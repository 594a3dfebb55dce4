"""The agent process: one per node, owns everything local. ``python -m resilio_hpc.launch.agent.agent SETTINGS``.

A single thread polls its sockets and children and lets the pure ``AgentCore`` decide. It outlives its ranks; ranks do
not outlive it; snapshots in shared memory outlive both.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from typing import Any

import zmq

from resilio_hpc.ckpt.restore import shared_blocks
from resilio_hpc.core import process_title, wire
from resilio_hpc.core.errors import LaunchError, ResilioError
from resilio_hpc.core.json_fields import printable
from resilio_hpc.core.ledger import Ledger
from resilio_hpc.events.event_text import words
from resilio_hpc.launch.agent.agent_files import AgentFiles, tell_supervisor
from resilio_hpc.launch.agent.caught_signals import CaughtSignals
from resilio_hpc.launch.agent.controller_connection import ControllerConnection
from resilio_hpc.launch.agent.decisions.agent_core import AgentCore
from resilio_hpc.launch.agent.device_eviction import DeviceEviction
from resilio_hpc.launch.agent.local_services import LocalServices
from resilio_hpc.launch.agent.own_job import OwnJob
from resilio_hpc.launch.agent.snapshots.disk_link import DiskLink
from resilio_hpc.launch.chain import orphaned_job
from resilio_hpc.launch.config.agent_settings import AGENT_FAILED, AGENT_LIVES, AgentSettings
from resilio_hpc.launch.controller.facts.state import controller_config
from resilio_hpc.launch.controller.host import ControllerHost
from resilio_hpc.launch.controller.run_metrics import RunMetrics
from resilio_hpc.launch.notify.notify import Notifier
from resilio_hpc.launch.process import announce, process_tree
from resilio_hpc.launch.process.helper_watch import HelperWatch
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.membership import Membership, first_membership
from resilio_hpc.launch.protocol.vote import EpochRecord, Term, VoteRecord
from resilio_hpc.launch.rundir import directory_locks, identity, stale_directories
from resilio_hpc.launch.rundir.node_memory import NodeMemory
from resilio_hpc.launch.rundir.storage import Storage
from resilio_hpc.launch.workers.forking import open_files
from resilio_hpc.launch.workers.node_context import NodeContext

PREDECESSOR_DIES_S = 3.0
ABANDON_S = 300.0  # without a quorum for so long, the agent ends its part of the job


class AnotherLives(LaunchError):
    """Raised where an agent of this run already runs on this node."""


class Agent:
    """The real ``agent_core.Ports``: sockets, child processes, and files."""

    def __init__(self, settings: AgentSettings) -> None:
        limit = open_files.raise_limit()
        run, targets = identity.identify(settings)
        try:
            local_dir, arena_dir, self._held_directories = directory_locks.take(
                run.run_id, settings.node, PREDECESSOR_DIES_S, settings.supervisor_pid
            )
        except BlockingIOError:
            raise AnotherLives(f"another agent of run {run.run_id} lives on {settings.node}") from None
        stale_directories.sweep([local_dir.parent, arena_dir.parent])
        token = f"{run.run_id}:{settings.node}"
        process_title.show("agent", token)
        os.environ[process_title.OWNER_VARIABLE] = token  # of its helper processes
        process_tree.become_subreaper()
        process_tree.sweep(token)  # kills ranks that a killed agent of this node left behind
        spool = local_dir / "spool"
        ledger = Ledger(spool / "ledger", f"{settings.job}-{settings.node}")
        self.node = NodeContext(settings, run, local_dir, arena_dir, ledger, limit)
        self._exit_code: int | None = None
        counters = wire.Counters()
        keys = wire.Keys.derive(run.secret)
        self._context: zmq.Context[Any] = zmq.Context()
        self._gatekeeper = wire.Gatekeeper(self._context, keys, counters)
        self._storage = Storage(run.path, spool, settings.job, run.run_id)
        self._memory = NodeMemory(local_dir, settings.job, settings.begins)
        self._notifier = Notifier(run, settings.job, ledger.append, targets, settings.cwd)
        self._host = ControllerHost(
            self._context, keys, settings.address, ledger, self._storage, counters, announce.say, self, settings.job,
            self._notifier.take, settings.clock_ahead_s(time.time()), local_dir / "test.log",
        )  # fmt: skip
        self._controller = ControllerConnection(self._context, keys, counters, settings.node)
        endpoint = f"{settings.address}:{self._host.port}"
        self.files = AgentFiles(settings, self._storage, endpoint, lambda: self._core)
        self._own_job = OwnJob(settings, self._storage, self._host.clock_ahead_s)
        self._devices = DeviceEviction(self.node, self._memory)
        self._disks = DiskLink(self.node)
        incarnation, slots = os.urandom(4).hex(), self._devices.slots
        hello = m.Hello(
            settings.node, incarnation, 0, endpoint, settings.address, slots,
            topology=os.environ.get("SLURM_TOPOLOGY_ADDR", ""), last=self._memory.kept("state", m.RoundState),
            evicted=len(self._devices.evicted), disk_port=self._disks.port,
        )  # fmt: skip
        self._core: AgentCore = AgentCore(
            hello, settings.job, self._vote_record(), self, settings.options.heartbeat_timeout_s, settings.join,
            min(ABANDON_S, settings.options.join_timeout_s), settings.begins, settings.graces(os.environ),
            settings.options.stop_grace_s,
        )  # fmt: skip
        run_metrics = RunMetrics(time.monotonic)
        self.services = LocalServices(
            self.node,
            self._core,
            self._devices,
            self._disks,
            token,
            spool,
            lambda: run_metrics.values(self._host.controller),
        )
        self._helpers = HelperWatch(self._helper_stopped, lambda: self.services.paused_pids)
        if settings.stop:
            self._core.warned(settings.stop, self._own_job.lasts_s(settings.stop))
        self._signals = CaughtSignals()
        self.record("agent", incarnation=incarnation, pid=os.getpid(), slots=slots)

    def _vote_record(self) -> VoteRecord:
        settings = self.node.settings
        expected = () if settings.join else settings.expected
        first = VoteRecord(first_membership(expected) if expected else Membership())
        return self._memory.kept("vote_record", VoteRecord) or first

    # -- the loop ----------------------------------------------------------------------------------------------

    def run_forever(self) -> int:
        """Run until End. Return the exit code."""
        self.services.start()
        while self._exit_code is None:
            self._poll()
            for part in (
                self._host, self._notifier, self._core, self.services, self._held_directories, self._helpers,
            ):  # fmt: skip
                part.tick()
            self._own_job.tick(self._core)
        return self._close()

    def _poll(self) -> None:
        poller = zmq.Poller()
        for watched in (self._host.socket, self._gatekeeper.socket, *self._controller.sockets):
            poller.register(watched, zmq.POLLIN)
        full = self._storage.full_fileno
        for descriptor in {self._signals.fileno(), self._storage.fileno(), *self.services.filenos()}:
            poller.register(descriptor, zmq.POLLIN)
        for waits in (full, *self.services.full_filenos()):
            if waits is not None:
                poller.register(waits, zmq.POLLOUT)
        ready = dict(poller.poll(int(self._core.next_wakeup_s * 1000)))
        if self._gatekeeper.socket in ready:
            self._gatekeeper.serve()
        if self._signals.fileno() in ready:
            self._on_signals()
        if self._storage.fileno() in ready or full in ready:
            self._storage.serve()
        self.services.serve({fd for fd in ready if isinstance(fd, int)})
        if self._host.socket in ready:
            self._host.serve()
        if any(socket in ready for socket in self._controller.sockets):
            if self._controller.is_lost():
                self._core.connection_lost()
            for message in self._controller.received():
                self._core.controller_said(message)

    def _on_signals(self) -> None:
        for name in self._signals.received():
            self.record("signal", signal=name)
            self._core.warned(name, self._own_job.lasts_s(name))

    def _close(self) -> int:
        """End all processes of this node, copy the ledger to the run directory, and return the exit code."""
        node = self.node
        for part in (self.services, self._controller, self._notifier):
            part.close()
        if not self._storage.close(10.0):
            identity.forget(node.local_dir)
            node.say(f"not all logs of {node.name} reached {node.run.path}; the rest is in {node.local_dir}")
        else:
            stale_directories.remove(node.local_dir)
        stale_directories.remove(node.arena_dir)
        shared_blocks.sweep()
        self._context.destroy(linger=200)
        return self._exit_code or 0

    def _helper_stopped(self, name: str, pid: int, action: str) -> None:
        self.record("helper_stopped", helper=name, pid=pid, action=action)
        self.node.say(words("helper_stopped", {"node": self.node.name, "helper": name, "pid": pid, "action": action}))

    @property
    def may_be_last(self) -> bool:
        """Return whether the job may have lost its batch host, which would close it."""
        settings = self.node.settings
        if settings.join or settings.supervisor_pid:
            return False
        return self.files.abandoned or settings.expected[0] in self._host.absent  # the batch host is the first node

    # -- ports -------------------------------------------------------------------------------------------------

    def monotonic(self) -> float:
        """Return seconds of a clock that does not jump."""
        return time.monotonic()

    def unix(self) -> float:
        """Return Unix seconds, for what is written down."""
        return time.time()

    def to_controller(self, message: m.ToController) -> None:
        """Queue a message to the controller that this agent follows."""
        if isinstance(message, m.FirstStep):  # the restart is complete
            self.services.resume_saves()
        self._controller.send(message)

    def follow(self, record: EpochRecord) -> None:
        """Connect to a controller."""
        self._controller.connect(record.endpoint)

    def contact(self, node: str, endpoint: str) -> None:
        """Connect to another agent, to ask for its vote or to answer it."""
        self._controller.connect(endpoint)

    def to_caller(self, node: str, message: m.ToAgent) -> None:
        """Queue a message to an agent that connected to this one."""
        self._host.say_to(node, message)

    def become_controller(self, term: Term) -> None:
        """Become the controller, after an election."""
        process_title.show("agent", None, f"(controller, epoch {term.epoch})")
        self._host.begin(controller_config(self.node.settings, self._host.clock_ahead_s), term)

    def step_down(self, reason: str) -> None:
        """End the controller of this process: it leads no more."""
        self._host.step_down(reason)

    def peer_said(self, message: m.NoLeader | m.Vote) -> None:
        """Pass on a message of an agent that called this one because of an election."""
        self._core.peer_said(message)

    def taken_for_controller(self, message: m.Hello | m.Heartbeat) -> None:
        """Answer an agent that follows this node, though no controller runs here."""
        self._core.taken_for_controller(message)

    def stepped_down(self, epoch: int, since: float, outvoted: bool) -> None:
        """Note that the controller of this process has ended itself."""
        process_title.show("agent")
        self._core.stepped_down(epoch, since, outvoted)

    def keep_vote_record(self, vote_record: VoteRecord) -> None:
        """Write the vote record to this node's disk, before any answer that depends on it is sent."""
        self._memory.keep("vote_record", vote_record)

    def record(self, kind: str, **fields: Any) -> None:
        """Write to the ledger."""
        self.node.record(kind, **fields)

    def keep(self, state: m.RoundState) -> None:
        """Keep the state on this node, for a restarted agent."""
        self._memory.keep("state", state)

    def leave(self, verdict: str, exit_code: int) -> None:
        """End this process with the verdict of the run."""
        tell_supervisor(self.node.settings, verdict, exit_code)
        echoes = self._core.ranks.ends.echoes
        self.record("agent_ends", verdict=verdict, **({"echoes": echoes} if echoes else {}))
        # an orderly end: the verdict file holds the run's result, and srun would only complain of another code
        self._exit_code = 0


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
            orphaned_job.close_job(agent.node.run.path, settings.job)
        return code
    except ResilioError as error:
        print(f"resilio-launch: error: {printable(str(error), 2000)}", file=sys.stderr)
        return AGENT_LIVES if isinstance(error, AnotherLives) else AGENT_FAILED


if __name__ == "__main__":
    gc.freeze()  # what was imported stays: the end would look through it for garbage
    sys.exit(main(sys.argv[1:]))
