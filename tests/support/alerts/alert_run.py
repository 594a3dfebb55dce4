"""A run directory of a virtual cluster: real controllers decide, and the real writers write what they say.

Only the supervisor's own lines are made here, with its own writer and fields: a virtual cluster has no supervisor.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from resilio_hpc.alerts.alert import Alert, default_limits
from resilio_hpc.alerts.judge import judge
from resilio_hpc.alerts.run_facts import AlertFacts, StepSeen, read_facts
from resilio_hpc.core.ledger import Ledger
from resilio_hpc.core.wire import Counters
from resilio_hpc.launch.chain import joining
from resilio_hpc.launch.chain.joining import LaunchRecord
from resilio_hpc.launch.cli.option_values import Caller
from resilio_hpc.launch.cli.options_parser import parse
from resilio_hpc.launch.controller.controller_status import status
from tests.support.virtual_cluster.world import UNIX_0, World

RUN_ID = "10c9f0e2a1b3"


class AlertRun:
    """One run. ``world``: of the present job; ``now``: Unix seconds of its clock."""

    def __init__(
        self, path: Path, world: World, job: str = "7", end_time_s: float | None = None, chain_max: int = 0,
        max_restarts: int = 3, began_ago_s: float | None = None,
    ) -> None:  # fmt: skip
        """Begin with a job. ``end_time_s``: its time limit, on the world's clock; ``chain_max``: jobs of its chain.

        ``began_ago_s``: the world's clock is that of this machine, so many seconds ago; None: it is its own.
        """
        self.path, self.world = path, world
        self.after = 0.0  # what is added to the world's clock
        if began_ago_s is not None:
            self.after = time.time() - began_ago_s - UNIX_0 - world.now
        self.chain_max = chain_max
        (path / "links").mkdir(parents=True, mode=0o700)
        (path / "run.json").write_text(json.dumps({"version": 1, "run_id": RUN_ID, "created": self.now}))
        words = [
            "--max-restarts",
            str(max_restarts),
            *(["--chain", "--chain-max", str(chain_max)] if chain_max else []),
        ]
        caller = Caller({}, Path("/work"), 0.0, 1)
        self.options = parse([*words, "--run-dir", str(path), "train.py"], caller).options
        self.begin(job, 1, end_time_s)

    @property
    def now(self) -> float:
        """Unix seconds."""
        return UNIX_0 + self.world.now + self.after

    def begin(self, job: str, link: int, end_time_s: float | None = None) -> None:
        """A job's launch begins."""
        self.job, self.link = job, link
        self._done = 0
        self._at = self.now
        self._supervisor = Ledger(self.path / "ledger", f"{job}-supervisor-main", lambda: self._at)
        self._controller = Ledger(self.path / "ledger", f"{job}-n1", lambda: self._at)
        record = LaunchRecord(job, job, self.options, "/work", chained=link < self.chain_max)
        joining.write_record(self.path, record)
        end = None if end_time_s is None else UNIX_0 + self.after + end_time_s
        self.say(
            "launch", job=job, mode="batch", nodes=sorted(self.world.sites), link=link, end_time=end,
            argv=["resilio-launch", "train.py"], slurm="26.05.0",
        )  # fmt: skip

    def next_job(self, job: str, world: World, end_time_s: float | None = None, queued_s: float = 30.0) -> None:
        """The next job begins, in a world of its own."""
        self.write()
        self.after += self.world.now + queued_s - world.now
        self.world, link = world, self.link + 1
        self.begin(job, link, end_time_s)

    def say(self, kind: str, /, **fields: Any) -> None:
        """The supervisor writes a line."""
        self._at = self.now
        self._supervisor.append(kind, **fields)

    def write(self) -> None:
        """Bring the files up to date: ledger, status, verdict."""
        entries, self._done = self.world.ledger[self._done :], len(self.world.ledger)
        for at, kind, fields in entries:
            self._at = UNIX_0 + self.after + at
            if kind == "launch_ends":
                continue
            moved = {"time": fields["time"] + self.after} if isinstance(fields.get("time"), float) else {}
            self._controller.append(kind, **{**fields, **moved})
        leads = next(iter(self.world.controllers()), None)
        if leads is not None:
            seen = status(leads.run, 1, Counters(), leads.hangs.stalled_s())
            (self.path / "status.json").write_text(json.dumps({**seen, "time": self.now}))
        elif self.world.directory.verdict is not None:
            verdict = {**self.world.directory.verdict, "time": self.now, "job": self.job}
            (self.path / "verdict.json").write_text(json.dumps(verdict))

    def close(self) -> None:
        """Close the ledger's files."""
        self._supervisor.close()
        self._controller.close()

    def facts(self, seen: StepSeen | None = None, later_s: float = 0.0) -> AlertFacts:
        """The facts of now, or of a check that comes later."""
        self.write()
        return read_facts(self.path, self.now + later_s, seen)

    def alerts(self, seen: StepSeen | None = None, later_s: float = 0.0, **limits: float) -> dict[str, Alert]:
        """The alerts that fire now, by key."""
        return {one.key: one for one in judge(self.facts(seen, later_s), {**default_limits(), **limits})}

    def names(self, **limits: float) -> Sequence[str]:
        """Their names."""
        return sorted(one.name for one in self.alerts(None, 0.0, **limits).values())
