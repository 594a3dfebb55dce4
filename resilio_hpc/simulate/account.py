"""A simulated run's time by cause, in whole microseconds, as ``resilio report`` has that of a real one. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from resilio_hpc.report.accounting.causes import TimeCause


@dataclass
class Account:
    """The time of a run of ``end_us`` microseconds. Each of them gets one cause.

    ``held`` and ``working``: nodes at the moment; ``node_us``: of all nodes that were held, ``idle_node_us``: of those
    without ranks. ``counts``: what happened how often.
    """

    end_us: int
    at_us: int = 0
    held: int = 0
    working: int = 0
    node_us: int = 0
    idle_node_us: int = 0
    by_cause: dict[TimeCause, int] = field(default_factory=lambda: dict.fromkeys(TimeCause, 0))
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def over(self) -> bool:
        """Return whether all of the time is spent."""
        return self.at_us >= self.end_us

    def spend(self, cause: TimeCause, us: int) -> None:
        """Give the next microseconds to a cause, as far as there are any left."""
        assert us >= 0, (cause, us)
        us = min(us, self.end_us - self.at_us)
        self.at_us += us
        self.by_cause[cause] += us
        if cause not in (TimeCause.QUEUE, TimeCause.UNKNOWN):
            self.node_us += us * self.held
            self.idle_node_us += us * (self.held - self.working)

    def repeat(self, us: int) -> None:
        """Take note that so much of the training did not last."""
        us = min(us, self.by_cause[TimeCause.TRAIN])
        self.by_cause[TimeCause.TRAIN] -= us
        self.by_cause[TimeCause.REPEATED] += us


@dataclass(frozen=True)
class SimulatedResult:
    """What became of one run. ``work``: the share of the work that ``nodes`` would have done without any loss."""

    nodes: int
    by_cause: dict[TimeCause, int]
    counts: dict[str, int]
    work: float
    node_us: int
    idle_node_us: int
    ended: str = ""

    @property
    def wall_us(self) -> int:
        """Return the length of the run."""
        return sum(self.by_cause.values())

    @property
    def of_held(self) -> float:
        """Return the work as a share of what all nodes that were held could have done, spares too."""
        return self.work * self.wall_us * self.nodes / self.node_us if self.node_us else 0.0

    @property
    def ettr(self) -> float:
        """Return train alone divided by the wall clock."""
        return self.by_cause[TimeCause.TRAIN] / self.wall_us

    @property
    def goodput(self) -> float:
        """Return train and save divided by the time in which jobs ran."""
        ran = self.wall_us - self.by_cause[TimeCause.QUEUE]
        if self.ended:
            ran -= self.by_cause[TimeCause.UNKNOWN]
        return (self.by_cause[TimeCause.TRAIN] + self.by_cause[TimeCause.SAVE]) / ran if ran else 0.0
