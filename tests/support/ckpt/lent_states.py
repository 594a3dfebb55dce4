"""Ranks of a node with the same tensors, of which one has saved a step and the others left a record of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from resilio_hpc.ckpt.replication import lost_ranks
from resilio_hpc.ckpt.restore.arena_source import ArenaSource
from resilio_hpc.ckpt.restore.borrowed_source import BorrowedSource
from resilio_hpc.ckpt.restore.restore import restore
from resilio_hpc.ckpt.snapshot import arena
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.boundary_record import (
    RecordWriter,
)
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot
from resilio_hpc.ckpt.state.own_part import own_part
from resilio_hpc.ckpt.state.tree import flatten
from tests.support.ckpt.replicator_process import POOL

WORLD = 4  # ranks 0 and 1 on one node, 2 and 3 on the other


def state(rank: int, step: int) -> dict[str, Any]:
    """A state of data parallel training: ranks have the same weights, and their own plain values."""
    draw = np.random.default_rng(step)
    own = {"rank": rank, "step": step, "rng": b"%d" % rank}
    return {"w": draw.random(300_000), "b": draw.random(3), "own": own, "generator": torch.full((50,), rank * step)}


def save(node: Path, rank: int, step: int, layout: Literal["own", "replicated"] = "replicated", life: int = 0) -> None:
    pair = ArenaPair(node, Owner(rank, rank % 2, WORLD, 2, life, layout, "run"), node / "spill")
    Snapshot(pair, step, flatten(state(rank, step)), POOL).finish()


def record(node: Path, rank: int, *done: int, early: bool = False, life: int = 0) -> RecordWriter:
    writer = RecordWriter(node, rank, WORLD, life)
    for step in done:
        writer.write(step, own_part(state(rank, step)), early)
    return writer


def whole_step(node: Path, life: int = 0) -> tuple[int, list[int]]:
    return lost_ranks.whole_step(node, (0, 1), life)


def lent(node: Path) -> list[tuple[int, int]]:
    return [(one.rank, one.holder.step) for one in lost_ranks.lent(node)]


def restored(node: Path, rank: int, step: int) -> Any:
    """What a rank restores, of its own snapshot or another one's; its own rank is in the header."""
    found = lost_ranks.borrowed(node, rank, step, WORLD)
    held = [one.path for one in arena.scan(node) if (one.rank, one.step) == (rank, step)]
    with BorrowedSource(found) if found is not None and not held else ArenaSource(held[0]) as source:
        assert (source.header.rank, source.header.local_rank) == (rank, rank % 2)
        return restore(source, None, POOL)


def is_state(found: Any, rank: int, step: int) -> bool:
    wanted = state(rank, step)
    names = ("w", "b", "generator")
    return found["own"] == wanted["own"] and all(bool((found[name] == wanted[name]).all()) for name in names)
