"""An agent as far as its copies of snapshots need one, with a real replicator."""

from __future__ import annotations

import select
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from resilio_hpc.ckpt.format.manifest import Layout
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.tree import flatten
from resilio_hpc.core import wire
from resilio_hpc.core.snapshot_transport import SnapshotTransport
from resilio_hpc.core.tiers import Tier
from resilio_hpc.launch.agent.snapshots.partner_copies import PartnerCopies
from resilio_hpc.launch.config.checkpoint_options import CheckpointOptions
from resilio_hpc.launch.config.mode import Mode
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.protocol.message_parts import Partner
from resilio_hpc.launch.workers.local_round import LocalRound
from tests.support.waiting import until

SECRET = wire.new_secret()
POOL = ThreadPoolExecutor(1)
MEMBERS = tuple(m.Member(f"n{number + 1}", number, "127.0.0.1", 1, number) for number in range(2))
STATE = m.RoundState(1, 0, m.world_of(MEMBERS), 0, 0, ())


class Node:
    """An agent as far as its copies need one; rank R runs on node R."""

    def __init__(
        self,
        root: Path,
        rank: int,
        enabled: bool = True,
        mode: Mode = Mode.RECOVER,
        transport: SnapshotTransport = "tcp",
    ) -> None:
        self.rank = rank
        self.arenas = root / f"arenas{rank}"
        self.local = root / f"local{rank}"
        self.arenas.mkdir()
        self.local.mkdir()
        self.recorded: list[tuple[str, dict[str, Any]]] = []
        self.brought: list[int] = []  # steps that ranks waited for
        self.said: list[str] = []
        self.failed: list[tuple[int, m.RestorePoint, str]] = []
        checkpoints = CheckpointOptions(partner_copies=enabled, snapshot_transport=transport)
        options = SimpleNamespace(checkpoints=checkpoints, mode=mode)
        context: Any = SimpleNamespace(
            arena_dir=self.arenas, local_dir=self.local, run=SimpleNamespace(secret=SECRET), name="n",
            settings=SimpleNamespace(address="127.0.0.1"), options=options,
            say=self.said.append, record=lambda kind, **fields: self.recorded.append((kind, fields)),
        )  # fmt: skip
        self.ranks: Any = SimpleNamespace(copies_failed=lambda *failed: self.failed.append(failed), local=None)
        self.now = 0.0
        self.copies = PartnerCopies(context, self.ranks, clock=lambda: self.now)
        self.copies.start()
        self.copies.begin((1, 0), -1)
        layout: Layout = "own" if enabled else "replicated"
        self._pair = ArenaPair(self.arenas, Owner(rank, 0, 2, 1, 0, layout, "run"), self.local / "spill")

    def save(self, step: int, floats: int = 1000, **more: Any) -> None:
        """The rank saves. ``more``: of its state, beside a tensor that is the same on all ranks."""
        state = {"w": np.full(floats, step, dtype=np.float32), **more}
        Snapshot(self._pair, step, flatten(state), POOL).finish()
        if self.ranks.local is not None:
            self.ranks.local.snapshot_whole = step

    def save_own(self, step: int, floats: int) -> None:
        """The rank saves, and does not say that others have the same."""
        pair = ArenaPair(self.arenas, Owner(self.rank, 0, 2, 1, 0, "own", "run"), self.local / "spill")
        Snapshot(pair, step, flatten({"w": np.zeros(floats, dtype=np.float32)}), POOL).finish()
        self.ranks.local.snapshot_whole = step

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.copies.port}"

    @property
    def pid(self) -> int:
        assert self.copies.link._process is not None
        return self.copies.link._process.pid

    def serve_until(self, holds: Callable[[], bool], passes_s: float = 0.0) -> None:
        """Serve; at each turn of the loop ``passes_s`` pass by the agent's clock."""

        def held() -> bool:
            if holds():
                return True
            fd = self.copies.link.fileno()
            if fd is not None and select.select([fd], [], [], 0.1)[0]:
                self.copies.serve()
            self.now += passes_s
            self.copies.tick()
            return holds()

        until(held, "what the copies do", lambda: self.recorded, poll_s=0.0)

    def keep(self, step: int, partner: Node, number: int = 0) -> None:
        self.copies.keep(m.PersistStep(1, number, step, Partner(partner.rank, 1, partner.endpoint)), 2)

    def follow(self, partner: Node, number: int = 0) -> None:
        """Copy each new step of the partner's, if it is a replica."""
        self.copies.follow(m.KeepCopies(1, number, Partner(partner.rank, 1, partner.endpoint)), 2)

    def fetch(self, step: int, other: Node, rank: int | None = None) -> None:
        """Ranks of round 1 start here and restore a step from ``other``."""
        rank = self.rank if rank is None else rank
        assert self.copies.fetch(*start(rank, step, other.endpoint))
        self.copies.when_brought(step, lambda: self.brought.append(step))
        assert self.brought == []

    def kept(self) -> list[int]:
        return sorted(held.step for held in self.copies.held())

    def told(self, kind: str) -> int:
        return sum(kind == name for name, _ in self.recorded)


def start(rank: int, step: int, endpoint: str, number: int = 1) -> tuple[LocalRound, m.Start]:
    state = m.RoundState(1, number, m.world_of(MEMBERS), 0, 0, ())
    order = m.Start(
        1, state, "127.0.0.1", 1, m.RestorePoint(Tier.MEMORY, step), (1, 0), (m.MissingSnapshot(rank, endpoint),)
    )
    return LocalRound(f"n{rank + 1}", state, MEMBERS[rank], order.restore), order
