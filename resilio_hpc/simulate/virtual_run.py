"""A run in virtual time: it trains, is struck, and is started again. Its subclasses decide. Pure."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from resilio_hpc.report.accounting.causes import TimeCause
from resilio_hpc.simulate.account import Account, SimulatedResult
from resilio_hpc.simulate.constants import Constants
from resilio_hpc.simulate.fault_trace import SimulatedFault
from resilio_hpc.simulate.save_times import SaveTimes

Phase = tuple[TimeCause, int]  # what the next microseconds are spent on


@dataclass(frozen=True)
class SimulatedSetup:
    """What is simulated. ``job_s``: the time limit of a job, None: none; ``save_every_s``: of training.

    ``partner_copies``, ``replicated``, ``last_step``, ``local_disks``: where a state is besides the shared file system.
    ``chained``: the next job of a chain carries on.
    """

    nodes: int
    gpus_per_node: int
    seconds: float
    spares: int = 0
    min_nodes: int = 0
    save_every_s: float = 600.0
    partner_copies: bool = False
    replicated: bool = False
    last_step: bool = True
    evict_devices: bool = False
    local_disks: bool = False
    chained: bool = True
    job_s: float | None = None
    max_restarts: int = 3

    @property
    def gpus(self) -> int:
        """Return the GPUs of a whole run, without its spares."""
        return self.nodes * self.gpus_per_node


class VirtualRun(ABC):
    """One run. Positions are microseconds of work of all nodes; times are microseconds from the run's begin."""

    def __init__(
        self, setup: SimulatedSetup, constants: Constants, faults: Sequence[SimulatedFault], saves: SaveTimes,
        watch: Callable[[float], None] = lambda _share: None,
    ) -> None:  # fmt: skip
        self.setup, self.constants, self.saves = setup, constants, saves
        self.account = Account(round(setup.seconds * 1e6))
        self.ended = ""
        self._faults, self._next, self._watch = faults, 0, watch
        self._returns: list[tuple[int, int]] = []  # when nodes are back
        self._plans: list[tuple[int, int, Callable[[], None]]] = []
        self.round_began_us = 0
        self.base = 0  # the position from which the round began
        self.working = setup.nodes  # nodes with ranks
        self.between_jobs = True  # the next job is to be launched
        self._held: int | None = 0  # the position at which the last round ended, None: ranks train

    # -- what subclasses decide ----------------------------------------------------------------------------------

    @abstractmethod
    def launch(self) -> None:
        """Begin the run."""

    @abstractmethod
    def strikes(self, fault: SimulatedFault) -> bool:
        """Take a fault of spares at once; return whether ranks are struck."""

    @abstractmethod
    def recover(self, fault: SimulatedFault) -> None:
        """Spend time until ranks train again, or the run has ended."""

    @abstractmethod
    def back(self, node: int) -> None:
        """Take a node that is sound again."""

    @abstractmethod
    def due_us(self) -> int:
        """Return when ``act`` is to be called, if the run trains until then."""

    @abstractmethod
    def act(self) -> None:
        """Change the run as planned."""

    # -- time ----------------------------------------------------------------------------------------------------

    def result(self) -> SimulatedResult:
        """Let the run go on until its end."""
        account = self.account
        while not account.over and not self.ended:
            if self.between_jobs:
                self.between_jobs = False
                self.launch()
            else:
                self._train()
            self._watch(account.at_us / account.end_us)
        done = self.position
        account.spend(TimeCause.UNKNOWN, account.end_us - account.at_us)
        return SimulatedResult(
            self.setup.nodes, dict(account.by_cause), dict(account.counts), done / account.end_us, account.node_us,
            account.idle_node_us, self.ended,
        )  # fmt: skip

    @property
    def in_round_us(self) -> int:
        """Return how long the round has trained."""
        return self.account.at_us - self.round_began_us

    @property
    def position(self) -> int:
        """Return the work that is done now."""
        return self.position_of(self.saves.trained(self.in_round_us)) if self._held is None else self._held

    def position_of(self, trained_us: int) -> int:
        """Return the position after so much training in this round."""
        return self.base + trained_us * self.working // self.setup.nodes

    def position_of_save(self, number: int) -> int:
        """Return the position of a snapshot of this round; 0: where it began."""
        return self.position_of(number * self.saves.every_us)

    def begin_round(self, position: int) -> None:
        """Train from ``position`` on."""
        self.round_began_us, self.base, self._held = self.account.at_us, position, None

    def go_back(self, lost: int) -> None:
        """Take note that so much work is to be done again."""
        self.account.repeat(lost * self.setup.nodes // max(1, self.working))

    def spend(self, phases: Sequence[Phase]) -> SimulatedFault | None:
        """Spend the time of phases without training; return the fault that strikes ranks meanwhile."""
        account = self.account
        for cause, us in phases:
            end = account.at_us + us
            while not account.over and account.at_us < end:
                fault = self._peek()
                at = end if fault is None else min(end, fault.at_us)
                at = min(at, self._returns[0][0]) if self._returns else at
                account.spend(cause, max(0, at - account.at_us))
                self._come_back()
                if fault is not None and fault.at_us <= account.at_us < end:
                    self._next += 1
                    if self.strikes(fault):
                        return fault
        return None

    def wait(self, cause: TimeCause, us: int) -> None:
        """Spend time in which no job runs: faults strike nothing."""
        self.account.spend(cause, us)
        while (fault := self._peek()) is not None and fault.at_us <= self.account.at_us:
            self._next += 1

    def absent(self, node: int, back_us: int) -> None:
        """Have a node back after so long."""
        heapq.heappush(self._returns, (self.account.at_us + back_us, node))

    @property
    def next_return_us(self) -> int:
        """Return when the next node is back; the run's end without one."""
        return self._returns[0][0] if self._returns else self.account.end_us

    def forget_returns(self) -> None:
        """Forget nodes of a job that has ended."""
        self._returns.clear()

    def _peek(self) -> SimulatedFault | None:
        return self._faults[self._next] if self._next < len(self._faults) else None

    def _come_back(self) -> None:
        while self._returns and self._returns[0][0] <= self.account.at_us:
            self.back(heapq.heappop(self._returns)[1])

    def _train(self) -> None:
        """Train until something happens."""
        account, fault = self.account, self._peek()
        at = min(account.end_us, self.due_us(), self.next_return_us)
        at = at if fault is None else min(at, fault.at_us)
        self._advance(max(at, account.at_us))
        self._come_back()
        if account.over:
            return
        if fault is not None and fault.at_us <= account.at_us:
            self._next += 1
            if self.strikes(fault):
                self._held = self.position
                self.recover(fault)
        elif self.due_us() <= account.at_us:
            self._held = self.position
            self.act()

    def _advance(self, until_us: int) -> None:
        before = self.saves.trained(self.in_round_us)
        us = until_us - self.account.at_us
        trained = self.saves.trained(self.in_round_us + us) - before
        self.account.spend(TimeCause.TRAIN, trained)
        self.account.spend(TimeCause.SAVE, us - trained)
