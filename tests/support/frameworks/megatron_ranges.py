"""Megatron's own account of what a distributed optimizer's rank holds, beside ours: run by test_megatron.

Its optimizer itself takes CUDA tensors alone. What it computes before, the ranges of parameters in a rank's share of a
buffer, and its ShardedTensor need no GPU. Prints the number of ranges that were compared.
"""

from __future__ import annotations

import random
from math import prod

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range

from resilio_hpc.ckpt import FULLY_RESHARDABLE, BucketParameter, FlatBucket, Slab, optimizer_layouts


def ranges(draw: random.Random) -> int:
    """Compare all ranks' ranges of a buffer with gaps, as Megatron pads it."""
    shapes = {f"p{number}": tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 3))) for number in range(9)}
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    at, places, ours = 0, {}, []
    for name, parameter in parameters.items():
        places[parameter] = (at, at + parameter.numel(), 0)
        ours.append(BucketParameter(name, at, shapes[name]))
        at += -(-parameter.numel() // 64) * 64
    data = draw.randint(1, 7)
    share, compared = -(-at // data), 0
    for rank in range(data):
        buffer = torch.arange(float(share)) + rank * share
        layouts = optimizer_layouts([FlatBucket({"exp_avg": buffer}, rank * share, ours)], FULLY_RESHARDABLE)
        found = layouts.layouts[FULLY_RESHARDABLE]
        theirs = DistributedOptimizer._build_model_gbuf_param_range_map(
            places, Range(rank * share, (rank + 1) * share), 0
        )
        assert set(found) == {name for name, parameter in parameters.items() if parameter in theirs}
        for name, values in found.items():
            its = theirs[parameters[name]]
            mine = values["exp_avg"]
            assert (mine.first, mine.first + len(mine.tensor)) == (its["param"].start, its["param"].end)
            assert torch.equal(mine.tensor, buffer[its["gbuf_local"].start : its["gbuf_local"].end])
            assert sum(prod(part.tensor.shape) for part in mine.parts()) == its["param"].size
            compared += 1
    return compared


def main() -> int:
    """Compare; then a ShardedTensor as a Slab."""
    draw = random.Random(1)
    compared = sum(ranges(draw) for _ in range(40))
    sharded = ShardedTensor.from_rank_offsets("up", torch.rand(4, 6), (0, 1, 2), (1, 2, 3), replica_id=(0, 0, 1))
    slab = Slab(sharded.data, sharded.global_shape, sharded.global_offset, int(any(sharded.replica_id)))
    assert (slab.global_shape, slab.start, slab.replica) == ((8, 18), (4, 12), 1)
    return compared


if __name__ == "__main__":
    print(main())
