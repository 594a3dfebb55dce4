"""Seconds of one micro-batch on every pipeline stage, from the cost of an iteration. Pure."""

from __future__ import annotations

import numpy as np

from resilio_hpc.autoparallel.base.efficiency import Efficiency
from resilio_hpc.autoparallel.base.layout import Layout
from resilio_hpc.autoparallel.cost.cost import Cost, Problem
from resilio_hpc.autoparallel.model import operators


def stage_times(
    cost: Cost, asked: Problem, layout: Layout, efficiency: Efficiency, host_s: float = 0.0
) -> tuple[list[float], list[float]]:
    """Return p_i of each stage, forward and backward, with traffic inside its layers; and c_(i,i+1) between stages.

    Layers are spread evenly, the first stages take the remainder, and the loss head is on the last. ``host_s``: the
    time that launches of kernels add to an iteration.
    """
    work = operators.work(asked.models, asked.layouts, asked.machines, asked.stacks, efficiency)
    head, count = _first(work.head), layout.micro_batches
    layers = int(asked.models.layers[0])
    moving = _first(cost.tensor_parallel) + _first(cost.expert_parallel) + _first(cost.context_parallel)
    moving += _first(cost.offload)
    spread = layers_of(layers, layout.pp, layout.head_layers)
    layer = ((_first(cost.compute) + moving + host_s) / count - head) / max(spread)
    stages = [layer * held for held in spread]
    stages[-1] += head
    return stages, [_first(cost.pipeline_transfers) / count] * (layout.pp - 1)


def layers_of(layers: int, stages: int, head_layers: int = 0) -> list[int]:
    """Return how many layers each stage has; see ``cost.stage_layers``."""
    most = -(-(layers + head_layers) // stages)
    missing = most * stages - layers - head_layers
    fewer = [stages - 1, 0, *range(1, stages - 1)][:missing]
    return [most - (stage in fewer) - head_layers * (stage == stages - 1) for stage in range(stages)]


def _first(column: object) -> float:
    return float(np.ravel(np.asarray(column))[0])
