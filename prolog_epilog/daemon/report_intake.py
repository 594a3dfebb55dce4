"""Which reports of users lead to a check: a few per user and hour, a few of all. The spool is read in a child, since
it may lie on a file system that hangs."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from resilio_hpc.core.errors import HealthError
from resilio_hpc.prolog_epilog.base import reports
from resilio_hpc.prolog_epilog.base.isolated import Child, Ended, Mark, Stuck, gather, still_there

LOOK_S = 10.0
BUDGET_S = 5.0
WINDOW_S = 3600.0
PER_USER, OF_ALL = 3, 20  # checks within WINDOW_S


@dataclass
class Admission:
    """Counts what was let through. Times in seconds of any clock that only goes forward."""

    _times: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def admit(self, user: int, now: float) -> bool:
        """Whether this user's report may have a check follow."""
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
    """``said`` gets a line for what came. ``unix_time``: files' ages are told by it. ``prepare`` makes or checks the
    spool, in a child that is given up after ``budget_s``."""

    spool: Path
    node: str
    said: Callable[[str], None]
    unix_time: Callable[[], float]
    budget_s: float = BUDGET_S
    prepare: Callable[[Path], None] = reports.prepare
    _admission: Admission = field(default_factory=Admission)
    _looked_s: float = -math.inf
    _stuck: Stuck | None = None
    _trouble: str = ""

    def wanted(self, now_s: float) -> bool:
        """Whether somebody's report is to have this node checked now. ``now_s``: seconds since boot."""
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
        if self._stuck is not None and still_there(self._stuck.pid, self._stuck.started):
            return reports.Sweep()
        self._stuck = None
        now, found = self.unix_time(), []

        def work(mark: Mark) -> bytes:
            mark(os.fspath(self.spool))
            try:
                self.prepare(self.spool)
                return msgspec.json.encode(reports.take(self.spool, self.node, now))
            except HealthError as error:
                return msgspec.json.encode(str(error))

        def told(_child: Child, ended: Ended) -> None:
            self._stuck = ended.stuck
            found.append(ended.answer)

        gather([Child(work, self.budget_s)], told)
        return self._understood(found[0])

    def _understood(self, answer: bytes | None) -> reports.Sweep:
        said = msgspec.json.decode(answer, type=reports.Sweep | str) if answer else f"{self.spool} does not answer"
        trouble = said if isinstance(said, str) else ""
        if trouble and trouble != self._trouble:
            self.said(trouble)
        self._trouble = trouble
        return reports.Sweep() if isinstance(said, str) else said
