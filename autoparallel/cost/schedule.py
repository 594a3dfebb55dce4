"""Pipeline schedules: the time of an iteration from the times of its stages, in closed form and pass by pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from resilio_hpc.autoparallel.base.columns import Column
from resilio_hpc.autoparallel.base.layout import Schedule


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one micro-batch, forward and backward: on the ``slowest`` stage, and in ``total`` over all stages.

    ``forward``: part of that in the forward pass; ``weights``: part that only gradients of weights take.
    """

    slowest: Column
    total: Column
    forward: Column
    weights: Column


def pipeline_time(stage: StageSeconds, micro_batches: Column, pp: Column, vpp: Column, schedule: Column) -> Column:
    """Seconds of an iteration: the slowest stage without a pause, and filling and draining through the others.

    Interleaving (vpp chunks per stage) divides the bubble by vpp (arXiv:2104.04473, 2.2). With fewer micro-batches than
    stages, each chunk but the last waits until the first micro-batch has been through all stages. With equal stages
    1F1B is formula (3) of the Resilio paper without its transfers.
    """
    whole = (stage.total - stage.slowest) / np.maximum(vpp, 1)
    waiting = np.maximum(pp - micro_batches, 0) * (vpp - 1) / np.maximum(vpp, 1) * stage.slowest
    return micro_batches * stage.slowest + whole * bubble(stage.forward, stage.weights, pp, schedule) + waiting


def rounds(micro_batches: Column, pp: Column) -> Column:
    """Return in how many groups an interleaved pipeline takes its micro-batches: as many as have one per stage.

    A chunk runs N = micro-batches / rounds of them in a row (arXiv:2407.21783, figure 6). Megatron's default is N = pp
    (--microbatch-group-size-per-virtual-pipeline-stage); PyTorch's Interleaved1F1B takes this number of rounds.
    """
    return np.maximum(np.floor(micro_batches / pp), 1)


def bubble(forward: Column, weights: Column, pp: Column, schedule: Column) -> Column:
    """Return the idle time of a schedule, as a part of 1F1B's (p - 1)(F + B + W).

    ZB-H1, ZB-1p: (p - 1)(F + B - W); ZB-H2, ZB-2p: (p - 1)(F + B - 2W) (arXiv:2401.10241, table 1 and section 3). ZB-V
    is bounded by the latter. DualPipe: (p/2 - 1)(F + B + W + B' - 3W), B' = B + W (arXiv:2412.19437, table 2).
    """
    inputs = 1 - forward - weights
    both = (pp / 2 - 1) / np.maximum(pp - 1, 1) * (1 + inputs - 2 * weights)
    parts = {
        Schedule.ZBH1: 1 - 2 * weights,
        Schedule.ZB1P: 1 - 2 * weights,
        Schedule.ZB2P: 1 - 3 * weights,
        Schedule.ZBV: 1 - 3 * weights,
        Schedule.DUALPIPE: both,
    }
    return np.select([schedule == kind for kind in parts], [np.maximum(part, 0.0) for part in parts.values()], 1.0)


def in_flight(after: Column, micro_batches: Column, pp: Column, vpp: Column, schedule: Column) -> Column:
    """Micro-batches whose activations a stage with ``after`` stages behind it holds, in units of all its layers.

    1F1B warms up with one more than there are stages behind; GPipe holds all. Zero-bubble schedules keep a micro-batch
    until the gradients of its weights: p of them on every stage, ZB-2p 2p (arXiv:2401.10241). DualPipe: p + 1.
    """
    chunks = 2 * after + (vpp - 1) * micro_batches / rounds(micro_batches, pp) + 1
    usual = np.where(vpp > 1, np.minimum(chunks, micro_batches * vpp) / vpp, after + 1)
    held = {
        Schedule.GPIPE: micro_batches,
        Schedule.ZBH1: pp,
        Schedule.ZB1P: pp,
        Schedule.ZB2P: 2 * pp,
        Schedule.ZBV: pp,
        Schedule.DUALPIPE: pp + 1,
    }
    most = np.select([schedule == kind for kind in held], list(held.values()), usual)
    return np.minimum(most, micro_batches)


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
    """Return interleaved 1F1B (arXiv:2104.04473, figure 4), with as many micro-batches in a row as ``rounds`` leaves.

    Raises ValueError where the micro-batches do not make whole rounds.
    """
    row, rest = divmod(micro_batches, max(micro_batches // stages, 1))
    if rest:
        raise ValueError(f"{micro_batches} micro-batches are no multiple of {micro_batches // stages} rounds")
    count = micro_batches * chunks
    place = [
        (k % (row * chunks) // row, k // (row * chunks) * row + k % row) for k in range(count)
    ]  # chunk and micro-batch of the k-th forward pass
    warm = min(2 * (stages - stage - 1) + (chunks - 1) * row, count)
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
