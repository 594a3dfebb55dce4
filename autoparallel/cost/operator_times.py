"""The roofline of a traced model's operators on one GPU: products, attention, and passes over memory. Pure.

A transformer is described by few numbers (``operators.py``); here each traced operator tells its FLOPs and its bytes.
The same fractions of data-sheet rates hold for both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from resilio_hpc.autoparallel.base.efficiency import Efficiency
from resilio_hpc.autoparallel.base.hardware import Machine, Machines
from resilio_hpc.autoparallel.base.layout import Layout, Layouts
from resilio_hpc.autoparallel.base.stack import Stack, Stacks
from resilio_hpc.autoparallel.model.operators import KERNEL_S, TILE, WIDE_TILE, Rates, head_reach, rates_of
from resilio_hpc.autoparallel.model.traced_model import TracedModel

OF_A_LAYER = 40.0  # traced operators of an eager transformer layer, whose launches ``host_us`` counts
FUSED = 0.5  # of the bytes of passes over memory, what is left where a compiler fuses each with its neighbour
PASSES_BACK = 1.5  # of the bytes that a pass moves forward, what it moves backward, as in ``operators.work``
ATTENTION_BACK = 1.25  # of its FLOPs: its backward pass makes the scores again

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class OperatorSeconds:
    """Seconds of each operator for one micro-batch, shape (operators,): on the GPU, and of the host's launches."""

    forward: Seconds
    backward: Seconds
    host: Seconds


def operator_seconds(
    model: TracedModel, micro_batch: int, machine: Machine, stack: Stack, efficiency: Efficiency
) -> OperatorSeconds:
    """Return the times of all operators. Values grow with the micro-batch, parameters do not."""
    graph, scale, element = model.graph, micro_batch / model.samples, model.element_bytes
    stack = replace(stack, precision=32) if element >= 4 else stack
    layouts, machines = Layouts.of([Layout(micro_batch=micro_batch)]), Machines.of([machine])
    rates = rates_of(machines, layouts, Stacks.of([stack]), efficiency)
    of = graph.operators
    flops = scale * np.array([op.forward_flops for op in of], dtype=float)
    back = np.array([op.backward_flops / max(op.forward_flops, 1) for op in of])
    made, read, held = scale * graph.made_bytes, scale * graph.read_bytes, graph.parameter_bytes.astype(float)
    # a product, the gradient of what it reads, and that of its weights or of the other value that it reads
    results, moved = (made, read, np.where(held > 0, held, read)), made + read + held
    forward, inputs, gradient = (_product(flops, size / element, moved, rates) for size in results)
    backward = np.minimum(back, 1.0) * inputs + np.maximum(back - 1.0, 0.0) * gradient
    head = head_reach(np.array([float(op.head_size or TILE) for op in of]), stack.flash)
    masked = np.where(np.array([op.masked and stack.causal for op in of]), 0.5, 1.0)
    attention = np.array(["attention" in op.name.rpartition(" ")[2] for op in of])
    scores = np.maximum(masked * flops / (rates.attention * head), (made + read) / rates.memory) + KERNEL_S
    forward = np.where(attention, scores, forward)
    backward = np.where(attention, ATTENTION_BACK * back * scores, backward)
    moved = read + made + np.minimum(held, made)  # of a table, only the rows that are asked for
    passes = (FUSED if stack.fused else 1.0) * efficiency.elementwise * moved / rates.memory + KERNEL_S
    forward, backward = np.where(flops == 0, passes, forward), np.where(flops == 0, PASSES_BACK * passes, backward)
    host = efficiency.host_us * 1e-6 / OF_A_LAYER * (1.0 if stack.fused else 1.3)
    return OperatorSeconds(forward, backward, np.full(len(of), host))


def _product(flops: Seconds, numbers: Seconds, moved: Seconds, rates: Rates) -> Seconds:
    """Return the seconds of products with so many numbers in their results: tiles, waves, depth as in ``operators``."""
    known = (flops > 0) & (numbers > 0)
    numbers = np.where(known, numbers, 1.0)
    waves = np.maximum(numbers / (TILE * WIDE_TILE), 1.0) / rates.sms
    depth = flops / (2 * numbers)
    reach = np.where(known, waves / (waves + rates.wave) * depth / (depth + rates.depth), 1.0)
    return np.maximum(flops / (rates.products * np.maximum(reach, 1e-6)), moved / rates.memory) + KERNEL_S
