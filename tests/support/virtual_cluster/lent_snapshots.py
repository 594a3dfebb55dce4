"""As ``ckpt.replication.lost_ranks``: what the ranks of a node can restore from its memory."""

from __future__ import annotations

from resilio_hpc.ckpt.replication import lost_ranks
from tests.support.virtual_cluster.ranks import Snapshot, Training

Memory = dict[tuple[int, int], Snapshot]
"""By rank and step."""


def lent(memory: Memory, ranks: list[int], number: int, training: Training | None) -> Memory:
    """As ``lost_ranks.lent``: what ranks can restore by another one's snapshot and their own record."""
    if training is None or not training.shares:
        return {}
    steps = {step for (rank, step), copy in memory.items() if rank in ranks and copy.life == training.life}
    found = {}
    for rank, step in [(rank, step) for rank in ranks for step in sorted(steps) if (rank, step) not in memory]:
        record = lost_ranks.record_of(training.records(rank), step, number, training.size)
        if record is not None:
            found[rank, step] = training.snapshot(rank, step, record.step)
    return found


def whole_step(memory: Memory, ranks: list[int], number: int, lent: Memory) -> tuple[int, list[int]]:
    """As ``lost_ranks.whole_step``: the newest step that all have, and the ranks that have it by what is lent."""
    taken = {step for (rank, step), copy in memory.items() if rank in ranks and copy.round == number}
    for step in sorted(taken, reverse=True):
        missing = [rank for rank in ranks if (rank, step) not in memory or memory[rank, step].round != number]
        if all((rank, step) in lent for rank in missing):
            return step, missing
    return -1, []
