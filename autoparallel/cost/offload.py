"""What lies in the host's memory: how much it is, and how long it takes to copy it and to step the optimizer there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from resilio_hpc.autoparallel.base.columns import Column
from resilio_hpc.autoparallel.base.hardware import Machines
from resilio_hpc.autoparallel.base.layout import Layouts, Offload
from resilio_hpc.autoparallel.base.stack import Stacks
from resilio_hpc.autoparallel.cost.activations import movable
from resilio_hpc.autoparallel.model.transformer import Transformers

# of the rates of a link and of the host's memory, what copies of pinned memory reach: bandwidthTest, 25 of 31.5 GB/s
# over PCIe Gen4 x16
LINK = 0.8
# of the host's memory bandwidth, what Adam reaches: 0.22 s for 1e9 parameters of 28 bytes on two Xeon 8168, which have
# 256 GB/s (CPU-Adam, arXiv:2101.06840, table 4)
ADAM = 0.5
ADAM_BYTES = 28.0  # read and written per parameter: gradient, parameter, two moments in fp32
HOST_SHARE = 0.8  # of the host's memory, what ranks may fill: the rest is for the system, loaders and checkpoints


def moves_optimizer(layouts: Layouts) -> NDArray[np.bool_]:
    """Return where the optimizer is on the host."""
    return np.asarray(np.mod(layouts.offload, 2) == Offload.OPTIMIZER)


def offloaded(models: Transformers, layouts: Layouts, stacks: Stacks) -> Column:
    """Return the bytes of one layer and micro-batch that are copied to the host."""
    moves = layouts.offload >= Offload.ACTIVATIONS
    if not np.any(moves):
        return np.zeros(1)
    return np.where(moves, movable(models, layouts, stacks), 0.0)


def _rate(machines: Machines) -> Column:
    """Return the bytes per second of copies one way while every GPU of the host makes some."""
    return np.minimum(machines.host_link, machines.host_bandwidth) * LINK


def copies_time(size: Column, machines: Machines, layer: Column, forward: Column) -> Column:
    """Return the seconds by which copies of ``size`` bytes are longer than a layer's passes, there and back.

    ``layer``: seconds of both passes; ``forward``: share of the forward pass.
    """
    once = size / _rate(machines)
    return np.maximum(once - layer * forward, 0.0) + np.maximum(once - layer * (1 - forward), 0.0)


def optimizer_on_host_time(held: Column, layouts: Layouts, machines: Machines, stacks: Stacks) -> Column:
    """Return the seconds of a step on the host: gradients there, Adam, parameters back, the slowest of these three.

    FSDP's shards of parameters and gradients are copied in each micro-batch, in fp32, twice and once.
    """
    share = held / np.where(layouts.zero >= 1, layouts.dp * layouts.cp / layouts.replicas, 1)
    link = _rate(machines)
    adam = ADAM_BYTES * share / (machines.host_bandwidth * ADAM)
    step = np.maximum(stacks.grad_bytes * share / link, adam)
    sharded = (layouts.zero >= 3) & (stacks.fp32_weights > 0)
    return np.where(sharded, adam + layouts.micro_batches * 8 * share / link, step)
