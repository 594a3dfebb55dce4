"""Pipeline schedules: the time of an iteration from the times of its stages, in closed form and pass by pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from resilio_hpc.autoparallel.base.columns import Column


def pipeline_time(slowest: Column, total: Column, micro_batches: Column, vpp: Column, zero_bubble: Column) -> Column:
    """Seconds of 1F1B or GPipe: the slowest stage without a pause, and filling and draining through the others.

    ``slowest``: seconds of one micro-batch on the slowest stage, forward and backward; ``total``: over all stages.
    Interleaving (vpp chunks per stage) divides the bubble by vpp (arXiv:2104.04473, 2.2); ZB-H1 leaves a third of it
    (arXiv:2401.10241). With equal stages this is formula (3) of the Resilio paper without its transfers.
    """
    bubble = (total - slowest) / np.maximum(vpp, 1) * np.where(zero_bubble > 0, 1 / 3, 1.0)
    return micro_batches * slowest + bubble


@dataclass(frozen=True)
class Pass:
    """One pass of one micro-batch on one stage; ``chunk`` counts the model's parts on that stage."""

    stage: int
    chunk: int
    micro_batch: int
    forward: bool
    start_s: float
    end_s: float


def one_f_one_b_order(stage: int, stages: int, micro_batches: int) -> list[tuple[int, int, bool]]:
    """Return warm-up, then forward and backward in turn (PipeDream-Flush, arXiv:2104.04473, figure 3)."""
    warm = min(stages - stage - 1, micro_batches)
    order = [(0, m, True) for m in range(warm)]
    for m in range(micro_batches - warm):
        order += [(0, m + warm, True), (0, m, False)]
    return order + [(0, m, False) for m in range(micro_batches - warm, micro_batches)]


def interleaved_order(stage: int, stages: int, micro_batches: int, chunks: int) -> list[tuple[int, int, bool]]:
    """Return interleaved 1F1B (arXiv:2104.04473, figure 4); micro-batches must be a multiple of the stages."""
    if micro_batches % stages:
        raise ValueError(f"{micro_batches} micro-batches are no multiple of {stages} stages")
    count = micro_batches * chunks
    place = [
        (k % (stages * chunks) // stages, k // (stages * chunks) * stages + k % stages) for k in range(count)
    ]  # chunk and micro-batch of the k-th forward pass
    warm = min(2 * (stages - stage - 1) + (chunks - 1) * stages, count)
    forward = [(chunk, m, True) for chunk, m in place]
    backward = [(chunks - 1 - chunk, m, False) for chunk, m in place]
    order = forward[:warm]
    for k in range(count - warm):
        order += [forward[warm + k], backward[k]]
    return order + backward[count - warm :]


def simulate(
    orders: Sequence[Sequence[tuple[int, int, bool]]], forward_s: Sequence[float], backward_s: Sequence[float]
) -> list[Pass]:
    """Return every pass with its times, when each stage follows its order as soon as its input is there.

    ``forward_s[i]``, ``backward_s[i]``: seconds of one chunk on stage i. Chunks lie round robin over the stages. Raises
    ValueError when the orders wait for one another.
    """
    stages = len(orders)
    chunks = 1 + max(item[0] for order in orders for item in order)
    ends: dict[tuple[int, int, bool], float] = {}  # keyed by part of the model, micro-batch, direction
    free, place, passes = [0.0] * stages, [0] * stages, list[Pass]()
    while any(place[s] < len(orders[s]) for s in range(stages)):
        moved = False
        for s in range(stages):
            while place[s] < len(orders[s]):
                chunk, m, forward = orders[s][place[s]]
                part = chunk * stages + s
                before = (part - 1, m, True) if forward else (part + 1, m, False)
                if not forward and part == chunks * stages - 1:
                    before = (part, m, True)
                if before not in ends and not (forward and part == 0):
                    break
                start = max(free[s], ends.get(before, 0.0))
                free[s] = ends[(part, m, forward)] = start + (forward_s[s] if forward else backward_s[s])
                passes.append(Pass(s, chunk, m, forward, start, free[s]))
                place[s] += 1
                moved = True
        if not moved:
            raise ValueError("the stages' orders wait for one another")
    return passes
