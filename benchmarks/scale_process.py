"""What the simulated agents of one process share. See ``scale_roles.py``."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from resilio_hpc.core import wire
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.membership import first_membership
from resilio_hpc.launch.protocol.vote import EpochRecord, VoteRecord
from resilio_hpc.launch.rundir import run_directory
from scale_loop import Loop

JOB = "scale"
SCAN_CACHE_S = 0.02
LARGE_BYTES = 1024


class Plan(msgspec.Struct, frozen=True):
    """What a process is told."""

    role: str
    run: str
    agents: int  # of the whole job
    first: int = 0  # this process's agents are first … first + count - 1
    count: int = 1
    timeout_s: float = 5.0
    port: int = 0  # of the bare server
    profile: str = ""  # where to write one

    @property
    def nodes(self) -> tuple[str, ...]:
        """As a cluster names them."""
        return tuple(f"node{number:05d}" for number in range(self.agents))


def tell(event: str, **fields: Any) -> None:
    """One line for ``controller_scale.py``."""
    print(json.dumps({"event": event, "at": time.monotonic(), **fields}), flush=True)


class Process:
    """What the agents of one process share."""

    def __init__(self, plan: Plan) -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.plan = plan
        self.loop = Loop()
        self.context: zmq.Context[Any] = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, min(65000, 16 * plan.count + 100))
        self.run = run_directory.open_run(Path(plan.run))
        self.keys = wire.Keys.derive(self.run.secret)
        self._decoded: dict[bytes, m.ToAgent] = {}
        self.vote_record = VoteRecord(first_membership(plan.nodes))
        self._scan: tuple[float, EpochRecord | None, int | None] = (0.0, None, None)

    def decode(self, frame: bytes) -> m.ToAgent:
        """On a real cluster every node decodes its own copy of a large broadcast; here one does it for all."""
        if len(frame) < LARGE_BYTES:
            return m.to_agent.decode(frame)
        known = self._decoded.get(frame)
        if known is None:
            if len(self._decoded) > 16:
                self._decoded.clear()
            known = self._decoded[frame] = m.to_agent.decode(frame)
        return known

    def scan(self) -> tuple[EpochRecord | None, int | None]:
        """Return the newest epoch, read once for all agents of this process."""
        if time.monotonic() > self._scan[0] + SCAN_CACHE_S:
            record = run_directory.newest_epoch(self.run.path)
            pulse = run_directory.read_pulse(self.run.path, record.epoch) if record else None
            self._scan = (time.monotonic(), record, pulse)
        return self._scan[1:]
