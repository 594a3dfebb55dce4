"""The peers' policies, as published: a table of times, and one run that follows a row of it. Pure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from resilio_hpc.core.errors import UsageError
from resilio_hpc.report.accounting.causes import TimeCause
from resilio_hpc.simulate.constants import Constant, Constants, SourceKind, table
from resilio_hpc.simulate.fault_trace import SimulatedFault
from resilio_hpc.simulate.fleets import FaultKind
from resilio_hpc.simulate.save_times import SaveTimes
from resilio_hpc.simulate.virtual_run import SimulatedSetup, VirtualRun

OWN_FAULT = (FaultKind.DEVICE, FaultKind.NODE)  # kinds after which another node is taken


class PeerNumber(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A time in seconds, and where it comes from."""

    value: float
    kind: SourceKind
    source: str


class PeerPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a peer keeps a run going.

    ``restart_s``: from the decision until ranks load; ``node_s``, ``hang_s``: until that is decided; ``blocked_s``:
    that a save takes from training; ``requeue``: without a spare, a new job is needed for a lost node; ``grows``: a
    restart takes at least as long as the program and its communicators do at this size.
    """

    name: str
    text: str
    memory: Literal["none", "own", "partner"]
    requeue: bool
    grows: bool
    restart_s: PeerNumber
    blocked_s: PeerNumber
    hang_s: PeerNumber
    node_s: PeerNumber
    save_every_s: PeerNumber | None = None
    load_s: PeerNumber | None = None

    def numbers(self) -> list[Constant]:
        """Return its own numbers with their sources."""
        names = ("restart_s", "blocked_s", "hang_s", "node_s", "save_every_s", "load_s")
        found = [(name, getattr(self, name)) for name in names]
        return [
            Constant(name=f"{self.name}.{name}", kind=one.kind, source=one.source, text=self.text, unit="s",
                     value=one.value)
            for name, one in found if one is not None
        ]  # fmt: skip


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    peer: list[PeerPolicy]


@functools.cache
def peers() -> dict[str, PeerPolicy]:
    """Return the peers' policies, by name."""
    return {one.name: one for one in msgspec.convert(table("peers.toml"), _Table).peer}


def peer_named(name: str) -> PeerPolicy:
    """Return a peer's policy. Raises UsageError."""
    found = peers().get(name)
    if found is None:
        raise UsageError(f"no policy is named {name}: resilio, {', '.join(peers())}")
    return found


def peer_saves(policy: PeerPolicy, setup: SimulatedSetup, constants: Constants) -> SaveTimes:
    """Return how long a peer's saves take."""
    every_s = setup.save_every_s if policy.save_every_s is None else policy.save_every_s.value
    state_gb = constants["gb_per_gpu"] * setup.gpus
    return SaveTimes(
        max(1, round((every_s or constants["step_s"]) * 1e6)), round(policy.blocked_s.value * 1e6), 0,
        round(state_gb / constants["store_gb_s"] * 1e6),
    )  # fmt: skip


class PeerRun(VirtualRun):
    """One run with a peer's policy. It keeps its size: it takes spares, or waits for another job."""

    def __init__(
        self, policy: PeerPolicy, setup: SimulatedSetup, constants: Constants, faults: Sequence[SimulatedFault],
        watch: Callable[[float], None] = lambda _share: None,
    ) -> None:  # fmt: skip
        super().__init__(setup, constants, faults, peer_saves(policy, setup, constants), watch)
        self._policy = policy
        self._spares, self._job_began_us, self._nodes = 0, 0, 0
        self._durable = self._furthest = self._left = 0  # positions; ``left``: from which ranks go on

    def launch(self) -> None:
        """Begin a job."""
        self._spares, self._job_began_us = self.setup.spares, self.account.at_us
        self.account.held = self.setup.nodes + self.setup.spares
        self.account.working = self.setup.nodes
        self._left = self._durable
        fault = self._start_ranks(TimeCause.START, self.constants.us("launch_s") + self._program_us())
        if fault is not None:
            self._go_on(fault)

    def _program_us(self) -> int:
        """Return what programs and their communicators take, under any launcher."""
        communicators_s = self.setup.gpus * self.constants["communicators_s_per_gpu"]
        return self.constants.us("program_start_s") + round(communicators_s * 1e6)

    def due_us(self) -> int:
        """Return when the job's time limit comes."""
        job_s = self.setup.job_s
        return self.account.end_us if job_s is None else self._job_began_us + round(job_s * 1e6)

    def act(self) -> None:
        """Save, and go on with the next job."""
        self.account.spend(TimeCause.SAVE, self.saves.durable_us)
        self._durable = self._furthest = self.position
        self._next_job()

    def _next_job(self) -> None:
        self.account.counts["jobs by the chain"] += 1
        self.forget_returns()
        self.wait(TimeCause.QUEUE, self.constants.us("queue_s"))
        self.between_jobs = True

    def strikes(self, fault: SimulatedFault) -> bool:
        """Take the loss of spares."""
        lost = sum(self.setup.nodes <= place < self.setup.nodes + self._spares for place in fault.places)
        if lost and (fault.lasting or fault.kind is FaultKind.NODE):
            self._take_spares(lost, fault.back_us)
        return any(place < self.setup.nodes for place in fault.places)

    def _take_spares(self, count: int, back_us: int) -> None:
        self._spares -= count
        for _ in range(count):
            self._nodes += 1
            self.absent(self._nodes, back_us)

    def back(self, node: int) -> None:
        """Keep a node that is sound again as a spare."""
        self._spares += 1

    def recover(self, fault: SimulatedFault) -> None:
        """Start again from the newest state that is left."""
        in_round = self.in_round_us
        self._furthest, self._left = self.position, self.position_of_save(self.saves.snapshots(in_round))
        self._durable = max(self._durable, self.position_of_save(self.saves.durable(in_round)))
        self._go_on(fault)

    def _go_on(self, fault: SimulatedFault | None) -> None:
        policy, account = self._policy, self.account
        while fault is not None and not account.over:
            account.counts["faults"] += 1
            account.counts[f"faults: {fault.kind.value}"] += 1
            if self._takes_memory(fault):
                self._left = min(self._left, self._durable)
            known = {FaultKind.HANG: policy.hang_s, FaultKind.NODE: policy.node_s}.get(fault.kind)
            struck = self.spend([(TimeCause.DETECT, round(known.value * 1e6) if known is not None else 0)])
            if struck is None and fault.kind in OWN_FAULT:
                needed = len([place for place in fault.places if place < self.setup.nodes])
                if self._spares >= needed:
                    self._take_spares(needed, fault.back_us)
                elif policy.requeue:
                    self._next_job()
                    return
            restart_us = max(round(policy.restart_s.value * 1e6), self._program_us() if policy.grows else 0)
            fault = struck or self._start_ranks(TimeCause.RECOVER, restart_us)

    def _takes_memory(self, fault: SimulatedFault) -> bool:
        """Return whether the newest snapshot is lost with a fault. Nodes that fail together may be each other's."""
        if self._policy.memory == "partner":
            return len(fault.places) > 1
        return self._policy.memory == "none" or fault.kind in OWN_FAULT

    def _start_ranks(self, cause: TimeCause, us: int) -> SimulatedFault | None:
        constants, position = self.constants, self._left
        load_s = self.saves.durable_us / 1e6 if position else 0.0
        if position > self._durable:
            load_s = constants["gb_per_gpu"] * constants["memory_load_s_per_gb"]
        load_s = load_s if self._policy.load_s is None else self._policy.load_s.value
        fault = self.spend([(cause, us), (TimeCause.LOAD, round(load_s * 1e6))])
        if fault is None and not self.account.over:
            self.go_back(self._furthest - position)
            self._furthest = position
            self.begin_round(position)
        return fault
