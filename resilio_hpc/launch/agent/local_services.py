"""What runs on an agent's node for its ranks: spawner, saver, replicator, disk giver, and looks at devices.

The real ``agent_ports.ServicePorts``.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from resilio_hpc.ckpt.coordination.coordinator import LOCAL_VARIABLE, PEER_DISKS_VARIABLE
from resilio_hpc.core import bounded, rank_link
from resilio_hpc.diagnose.causes import known_faults
from resilio_hpc.launch.agent.collective_traces import CollectiveTraces
from resilio_hpc.launch.agent.decisions.agent_core import AgentCore
from resilio_hpc.launch.agent.device_eviction import DeviceEviction
from resilio_hpc.launch.agent.environment_check import EnvironmentCheck
from resilio_hpc.launch.agent.kept_ranks import KeptRanks
from resilio_hpc.launch.agent.last_step import LastStepSaves
from resilio_hpc.launch.agent.node_metrics import NodeMetrics
from resilio_hpc.launch.agent.node_probe import NodeProbe
from resilio_hpc.launch.agent.rank_surroundings import RankSurroundings
from resilio_hpc.launch.agent.snapshots.disk_link import DiskLink
from resilio_hpc.launch.agent.snapshots.disk_look import DiskLook
from resilio_hpc.launch.agent.snapshots.local_snapshots import LocalSnapshots
from resilio_hpc.launch.agent.snapshots.partner_copies import PartnerCopies
from resilio_hpc.launch.agent.snapshots.read_ahead_link import ReadAheadLink
from resilio_hpc.launch.process import process_tree
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.drill_messages import Blow
from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.mpi.ranks import local_ranks
from resilio_hpc.launch.workers.node_context import NodeContext
from resilio_hpc.launch.workers.rank_owner import StopHow

_BLOWS: Mapping[Blow, signal.Signals] = {
    "kill_rank": signal.SIGKILL, "abort_rank": signal.SIGABRT, "stop_rank": signal.SIGSTOP,
}  # fmt: skip


class LocalServices:
    """The ranks of one node and what they need there. No call blocks."""

    def __init__(
        self,
        node: NodeContext,
        core: AgentCore,
        devices: DeviceEviction,
        disks: DiskLink,
        token: str,
        spool: Path,
        run: Callable[[], dict[str, float]],
    ) -> None:
        """Take the parts whose state the agent's first Hello tells.

        ``token`` marks the node's ranks in ``/proc``. ``run``: the controller's values of metrics, where it is here.
        """
        self._core = core.ranks
        self._devices = devices
        self._disks = disks
        devices.attach(core, self._start_ranks)
        self._environment = EnvironmentCheck(node, core.ranks.reports, self._spawn_on_devices)
        self._disk_look = DiskLook(node, core.ranks.reports)
        self._snapshots = LocalSnapshots(node, core.ranks, self.tell_rank)
        self._copies = PartnerCopies(node, core.ranks)
        self._last_step = LastStepSaves(
            node, core.ranks, self.tell_rank, self._copies.make_lost, is_stopped=self._is_stopped
        )
        self._kept = KeptRanks(node, core.ranks, self.tell_rank, is_stopped=self._is_stopped)
        self._read_ahead = ReadAheadLink(node, disks)
        self._probe = NodeProbe(node)
        os.environ[LOCAL_VARIABLE] = node.options.checkpoints.local_checkpoints  # ranks inherit both variables
        os.environ[PEER_DISKS_VARIABLE] = str(disks.known)
        self._traces = CollectiveTraces(node, spool)
        around = RankSurroundings(devices, self._traces)
        self._ranks = local_ranks(node, core.ranks, around, self._read_ahead.begun, token, spool)
        self._metrics = NodeMetrics(node, core.ranks, lambda: self._ranks.pids, run)

    # -- the agent's loop ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the spawner and the helpers."""
        self._environment.start()
        self._disk_look.start()
        self._ranks.start()
        self._copies.start()
        self._disks.start()
        self._read_ahead.guess(self._core.slots, self._snapshots.held())
        bounded.begin(known_faults.prepare)

    def tick(self) -> None:
        """Do what is due."""
        for part in (
            self._ranks, self._last_step, self._kept, self._snapshots, self._copies, self._disks, self._read_ahead,
            self._devices, self._metrics, self._traces, self._environment, self._probe, self._disk_look,
        ):  # fmt: skip
            part.tick()

    def filenos(self) -> Iterator[int]:
        """Return the descriptors to poll."""
        yield from self._ranks.filenos()
        yield from self._devices.filenos()
        yield from self._environment.filenos()
        yield from self._disk_look.filenos()
        for child in (self._snapshots.saver, self._copies.link, self._metrics):
            descriptor = child.fileno()
            if descriptor is not None:
                yield descriptor

    def full_filenos(self) -> Iterator[int | None]:
        """Return the descriptors to poll for writing; None where nothing waits."""
        yield self._snapshots.saver.full_fileno
        yield self._copies.link.full_fileno

    def serve(self, ready: set[int]) -> None:
        """Serve descriptors that are ready."""
        serves: tuple[Callable[[], None], ...] = (self._snapshots.serve, self._copies.serve)
        for child, serve in zip((self._snapshots.saver, self._copies.link), serves, strict=True):
            if child.fileno() in ready:
                serve()
            if child.full_fileno in ready:
                child.push()
        if self._metrics.fileno() in ready:
            self._metrics.serve()
        self._ranks.serve(ready)

    def close(self) -> None:
        """End all processes of this node."""
        for part in (
            self._ranks, self._metrics, self._snapshots, self._copies, self._disks, self._devices, self._read_ahead,
            self._traces, self._environment, self._probe, self._disk_look,
        ):  # fmt: skip
            part.close()

    @property
    def paused_pids(self) -> tuple[int, ...]:
        """Return the helpers that are stopped on purpose."""
        return self._snapshots.saver.paused_pids

    def resume_saves(self) -> None:
        """Let the saver work again: the restart is complete."""
        self._snapshots.saver.resume()

    def _is_stopped(self, local_rank: int) -> bool:
        return process_tree.is_stopped(self._ranks.pids.get(local_rank, 0))

    # -- ports ---------------------------------------------------------------------------------------------------

    def stop_ranks(self, how: StopHow, keep_stores_from: int) -> None:
        """End all ranks and their descendants, so that no process competes with their restart."""
        self._snapshots.ranks_stop()
        self._copies.give_up()
        self._devices.ranks_stop(how.for_good)
        self._environment.ranks_stop(how.for_good)
        self._ranks.stop(how, keep_stores_from)

    def save_last_step(self, local: LocalRound, worth: m.LastStep, ahead: bool = False) -> bool:
        """Have the step saved that the ranks finished last, where they can do so."""
        return self._last_step.begin(local, worth, ahead)

    def keep_ranks(self, local: LocalRound) -> bool:
        """Have ranks leave their round that can enter the next one in their processes."""
        return self._kept.begin(local)

    def judge(self, cause: m.Cause | None) -> None:
        """Take what ended the last round: the console shows no echoes of it."""
        self._ranks.judge(cause)

    def terminate_ranks(self) -> None:
        """Send SIGTERM to ranks that do not use ``resilio_hpc.train``; they end by themselves."""
        self._ranks.terminate()

    def strike(self, message: m.DrillStrike) -> None:
        """Send a signal to a rank or to this agent: a drill that a user has ordered."""
        if message.blow == "kill_agent":
            os.kill(os.getpid(), signal.SIGKILL)
        pid = self._ranks.pids.get(message.local_rank)
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, _BLOWS[message.blow])

    def look_at_ranks(self, message: m.LookAtRanks) -> None:
        """Look at all ranks of this node from outside."""
        self._ranks.look(message)

    def probe(self, message: m.BeginProbe | m.EndProbe) -> None:
        """Start or end this node's checker for a test of nodes."""
        self._probe.order(message)

    def calls(self) -> int:
        """Return how many calls of communication libraries were begun and completed here; -1 where none are seen."""
        return self._ranks.calls()

    def memory(self) -> tuple[int, str]:
        """Return the worst memory level of this node (0: as usual, 1: warning, 2: critical), and what it is about."""
        return self._metrics.level, self._metrics.memory

    def open_store(self, round_number: int) -> None:
        """Open the rendezvous store of a round."""
        self._ranks.open_store(round_number)

    def spawn(self, local: LocalRound, start: m.Start) -> None:
        """Start the local ranks of a round, after their files and devices were looked at."""
        if not self._environment.holds(local, start):
            self._spawn_on_devices(local, start)

    def _spawn_on_devices(self, local: LocalRound, start: m.Start) -> None:
        if not self._devices.holds(local, start):
            self._start_ranks(local, start)

    def _start_ranks(self, local: LocalRound, start: m.Start) -> None:
        """Start the ranks of a round, whose snapshots from other nodes have arrived meanwhile (RES-16)."""
        self._traces.begin(start)
        self._disks.begin(start)
        self._read_ahead.begin(local, start)
        if self._copies.fetch(local, start):
            self._ranks.spawn(local, start)

    def restart_rank(self, local: LocalRound, local_rank: int) -> None:
        """Start one rank of the round again; the others go on."""
        self._ranks.restart(local, local_rank)

    def tell_rank(self, local_rank: int, message: rank_link.AgentMessage) -> None:
        """Send a message to an attached rank."""
        local = self._core.local
        if local is not None:
            self._ranks.server.tell(local.number, local_rank, message)

    def persist(self, message: m.PersistStep, member: m.Member, world_size: int) -> None:
        """Write this node's file of a step, and copy the partner's snapshots of it."""
        self._copies.when_brought(message.step, lambda: self._snapshots.persist(message, member, world_size))
        self._copies.keep(message, world_size)

    def keep_copies(self, message: m.KeepCopies, world_size: int) -> None:
        """Keep replica copies of the partner's snapshots."""
        self._copies.follow(message, world_size)

    def commit(self, message: m.CommitStep) -> None:
        """Write the manifest of a step."""
        self._snapshots.commit(message)

    def held(self) -> tuple[m.Held, ...]:
        """Return the whole snapshots in this node's memory, its own and copies of its partner's."""
        return self._snapshots.held() + self._copies.held()

    def copy_port(self) -> int:
        """Return the port at which other nodes may fetch copies; 0 without one."""
        return self._copies.port

    def forget_snapshots_after(self, step: int, life: m.Life) -> None:
        """Drop snapshots of later steps: that life computes them again."""
        self._snapshots.forget_after(step)
        self._copies.begin(life, step)
