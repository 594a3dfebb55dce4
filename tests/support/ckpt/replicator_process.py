"""Replicators as processes, each with the directories of a node of its own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import numpy as np

from resilio_hpc.ckpt.replication.messages import (
    Answer,
    Request,
    ServeSnapshots,
    Serving,
    StillFetching,
    decode_answer,
)
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.core import wire
from resilio_hpc.core.json_lines import encode_line
from resilio_hpc.core.snapshot_transport import SnapshotTransport
from tests.support.waiting import PATIENCE_S

POOL = ThreadPoolExecutor(1)
SECRET = wire.new_secret().decode()
HOST = "127.0.0.1"


class Replicator:
    """One node: its directories and its replicator."""

    def __init__(
        self, root: Path, secret: str = SECRET, silent_s: float = PATIENCE_S, transport: SnapshotTransport = "tcp"
    ) -> None:
        self.secret = secret
        self.arenas, self.copies, self.spill = root / "arenas", root / "arenas" / "copies", root / "spill"
        self.arenas.mkdir(parents=True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "resilio_hpc.ckpt.replication.replicator"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input: IO[bytes] = self.process.stdin
        self.output: IO[bytes] = self.process.stdout
        self.send(
            ServeSnapshots(secret, HOST, str(self.arenas), str(self.copies), str(self.spill), silent_s, transport)
        )
        serving = self.answer()
        assert isinstance(serving, Serving)
        self.endpoint = f"{HOST}:{serving.port}"

    def send(self, request: Request) -> None:
        self.input.write(encode_line(request))
        self.input.flush()

    def answer(self) -> Answer:
        while isinstance(answer := decode_answer(self.output.readline()), StillFetching):
            pass
        return answer

    def ask(self, request: Request) -> Answer:
        self.send(request)
        return self.answer()

    def says_nothing(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while select.select([self.output], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not isinstance(decode_answer(self.output.readline()), StillFetching):
                return False
        return True

    def take(self, rank: int, step: int, floats: int = 1000, world: int = 4) -> ArenaPair:
        """A snapshot of a rank of this node."""
        pair = ArenaPair(self.arenas, Owner(rank, rank % 2, world, 2, 0, "own", "run"), self.spill)
        state = {"w": np.full(floats, rank * 1000 + step, dtype=np.float32), "step": step, "rank": rank}
        Snapshot(pair, step, flatten(state), POOL).finish()
        return pair

    def close(self) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGCONT)
        self.input.close()
        assert self.process.wait(PATIENCE_S) in (0, -signal.SIGKILL)
        self.output.close()
