"""Which users' reports start a check: a few per user and hour, a few of all.

A child reads the spool, which may lie on a file system that hangs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from pathlib import Path

import msgspec

from resilio_hpc.core.errors import HealthError
from resilio_hpc.prolog_epilog.base import reports
from resilio_hpc.prolog_epilog.base.isolated import OneAtATime

LOOK_S = 10.0
BUDGET_S = 5.0
WINDOW_S = 3600.0
PER_USER, OF_ALL = 3, 20  # checks within WINDOW_S


@dataclass
class Admission:
    """Counts admitted reports. Times in seconds of a clock that only goes forward."""

    _times: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def admit(self, user: int, now: float) -> bool:
        """Return whether this user's report may start a check."""
        for number in list(self._times):
            self._times[number] = [at for at in self._times[number] if now - at < WINDOW_S]
            if not self._times[number]:
                del self._times[number]
        if len(self._times[user]) >= PER_USER or sum(map(len, self._times.values())) >= OF_ALL:
            return False
        self._times[user].append(now)
        return True


@dataclass
class ReportIntake:
    """Takes reports. ``said`` is called with a line for each.

    ``unix_time``: for the age of files. ``prepare`` makes or checks the spool, in a child that is given up after
    ``budget_s``.
    """

    spool: Path
    node: str
    said: Callable[[str], None]
    unix_time: Callable[[], float]
    budget_s: InitVar[float] = BUDGET_S
    prepare: Callable[[Path], None] = reports.prepare
    _admission: Admission = field(default_factory=Admission)
    _looked_s: float = -math.inf
    _trouble: str = ""

    def __post_init__(self, budget_s: float) -> None:
        self._child = OneAtATime(budget_s)

    def wanted(self, now_s: float) -> bool:
        """Return whether a user's report asks to check this node now. ``now_s``: seconds since boot."""
        if now_s - self._looked_s < LOOK_S:
            return False
        self._looked_s = now_s
        sweep = self._sweep()
        for text in sweep.refused:
            self.said(f"in the spool of reports, removed: {text}")
        admitted = False
        for one in sweep.taken:
            allowed = self._admission.admit(one.user, now_s)
            admitted = admitted or allowed
            self.said(f"user {one.user} reports this node{'' if allowed else ' (once too often, ignored)'}: {one.why}")
        return admitted

    def _sweep(self) -> reports.Sweep:
        now = self.unix_time()

        def work() -> bytes:
            try:
                self.prepare(self.spool)
                return msgspec.json.encode(reports.take(self.spool, self.node, now))
            except HealthError as error:
                return msgspec.json.encode(str(error))

        return self._understood(self._child.answer(self.spool, work))

    def _understood(self, answer: bytes | None) -> reports.Sweep:
        said = msgspec.json.decode(answer, type=reports.Sweep | str) if answer else f"{self.spool} does not answer"
        trouble = said if isinstance(said, str) else ""
        if trouble and trouble != self._trouble:
            self.said(trouble)
        self._trouble = trouble
        return reports.Sweep() if isinstance(said, str) else said
