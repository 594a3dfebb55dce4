"""The Resilio paper's own planner: algorithm 1 chooses the layouts, formula (3) gives their time. RES-18, RES-20.

Kept beside the fuller model (``cost``) for comparison: ``--cost paper``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Shape = tuple[int, int]
"""Nodes, GPUs per node."""


@dataclass(frozen=True)
class Degrees:
    """One row of algorithm 1's matrix L."""

    pp: int
    dp: int
    tp: int


def shapes(gpus: int) -> list[Shape]:
    """All (nodes, GPUs per node) of so many GPUs, most GPUs per node first."""
    return [(gpus // per_node, per_node) for per_node in range(gpus, 0, -1) if gpus % per_node == 0]


def algorithm_1(
    gpus: int,
    satisfiable: Callable[[Shape], bool],
    feasible: Callable[[Shape], bool],
    model_bytes: float,
    gpu_bytes: float,
) -> list[Degrees]:
    """Parallel degrees of every shape that both filters keep: pp is the number of nodes, dp and tp lie inside a node.

    ``satisfiable`` asks the cluster (filter one); ``feasible`` prunes once more, only where several shapes are left
    (filter two). The paper leaves ``fun`` open: here tp is the smallest divisor of a node's GPUs with which a stage's
    share of the model's state fits into a GPU, and dp takes the rest; a shape with which nothing fits is left out.
    """
    kept = [shape for shape in shapes(gpus) if satisfiable(shape)]
    if len(kept) > 1:
        kept = [shape for shape in kept if feasible(shape)]
    found = []
    for nodes, per_node in kept:
        stage_bytes = model_bytes / nodes
        tp = next((d for d in range(1, per_node + 1) if per_node % d == 0 and stage_bytes / d <= gpu_bytes), None)
        if tp is not None:
            found.append(Degrees(nodes, per_node // tp, tp))
    return found


def formula_3(stages_s: Sequence[float], transfers_s: Sequence[float], micro_batches: int) -> float:
    """Seconds of an iteration: t = Σ p_i + Σ c_(i,i+1) + (B - 1) · max p_i.

    ``stages_s``: seconds of one micro-batch on each stage; ``transfers_s``: between neighbours, one fewer. B is the
    number of micro-batches; the paper prints their size, with which this would not be the time of an iteration.
    """
    if len(transfers_s) != len(stages_s) - 1 or micro_batches < 1:
        raise ValueError(f"{len(stages_s)} stages, {len(transfers_s)} transfers, {micro_batches} micro-batches")
    return sum(stages_s) + sum(transfers_s) + (micro_batches - 1) * max(stages_s)
