"""The layouts that a search looks at: every combination of degrees that a framework can run on so many GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from resilio_hpc.autoparallel.base.columns import Column
from resilio_hpc.autoparallel.base.hardware import Machine
from resilio_hpc.autoparallel.base.layout import Layouts, Offload, Recompute, Schedule
from resilio_hpc.autoparallel.cost.schedule import rounds
from resilio_hpc.autoparallel.model.transformer import Transformer, Transformers


@dataclass(frozen=True)
class Space:
    """The layouts to look at. ``micro_batch``, ``tp``: largest; ``cp``, ``zero``, ``recompute``: values (no cp: all).

    ``pipeline_zero``: stages of ZeRO that may be combined with pipeline parallelism. ``rounds``: micro-batches of an
    interleaved pipeline: "whole", a multiple of the stages; "longer", rounds of at least so many; or "any", also fewer
    than stages (``schedule.rounds``). ``replicas``: ZeRO-3 may shard within groups of whole nodes (HSDP).
    ``expert_tp``: any number of tensor-parallel ranks may share an expert. ``uneven``: the last stage may have fewer
    layers than the others (``head_layers``). ``offload``: what may lie in the host's memory; ``offload_zero``: stages
    of ZeRO with which the optimizer may; ``offload_recompute``: kinds with which activations may; ``offload_ranked``:
    also where something fits without. ``only``: degrees that are given, by name (tp, pp, ep, etp, micro_batch, vpp).
    """

    micro_batch: int = 16
    tp: int = 64
    cp: tuple[int, ...] = ()
    zero: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[Recompute, ...] = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
    interleaving: bool = True
    schedules: tuple[Schedule, ...] = (Schedule.ONE_F_ONE_B,)
    pipeline_zero: tuple[int, ...] = (0, 1)
    rounds: str = "whole"
    replicas: bool = False
    sequence_parallel: bool = True
    expert_tp: bool = False
    uneven: bool = False
    offload: tuple[Offload, ...] = (Offload.NONE,)
    offload_ranked: bool = False
    offload_zero: tuple[int, ...] = (1, 2, 3)
    offload_recompute: tuple[Recompute, ...] = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
    only: Mapping[str, int] = field(default_factory=dict)

    def may(self, name: str, value: int) -> bool:
        """Return whether the degree of this name may have this value."""
        return self.only.get(name, value) == value


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


SHORTEST = 4096  # tokens of a sequence on one rank, below which cutting it further is not looked at


def context_degrees(model: Transformer, space: Space) -> list[int]:
    """Return context-parallel degrees: those that are given, or powers of two with long enough pieces.

    A rank has two pieces of a sequence, from both ends, so that causal masks leave all ranks equal work.
    """
    if space.cp:
        return [d for d in space.cp if d == 1 or model.seq % (2 * d) == 0]
    most = max(1, model.seq // SHORTEST)
    return [1 << k for k in range(most.bit_length()) if k == 0 or model.seq % (2 << k) == 0]


@cache
def head_layers(model: Transformer, pp: int) -> int:
    """Return how many layers the loss head counts as, so that the largest stage has least FLOPs (RES-19), else 0.

    Exact for whole layers: of the partitions in which the last stage has so many layers, an even rest is the best.
    """
    models, layers, heads = Transformers.of([model]), model.layers + model.mtp, 1 + model.mtp
    head = 6 * float(models.embedding_parameters[0])
    layer = (float(models.flops_per_token[0]) - head) / model.layers
    best, count = math.inf, 0
    for fewer in range(layers // (pp - 1) + 2):
        most = -(-(layers + fewer) // pp)
        last = most - fewer - (most * pp > layers + fewer)
        largest = max(most * layer, last * layer + heads * head)
        if last >= model.mtp and largest < best:
            best, count = largest, fewer
    return count


def _chunks(layers: int, pp: int, space: Space, head: int) -> list[int]:
    """Return numbers of chunks per stage; embedding and loss head may count as layers (``cost.stage_layers``)."""
    if pp == 1 or not space.interleaving:
        return [1]
    found = {d for count in (layers, layers + 2, layers + head) if count % pp == 0 for d in divisors(count // pp)}
    return sorted(found or {d for d in (1, 2, 4) if pp * d <= layers})


def _makes_rounds(micro_batches: Column, pp: int, space: Space) -> NDArray[np.bool_]:
    """Return where so many micro-batches make whole rounds of an interleaved pipeline."""
    if space.rounds == "whole":
        return np.asarray(np.mod(micro_batches, pp) == 0)
    whole = np.mod(micro_batches, rounds(micro_batches, np.array([float(pp)]))) == 0
    return np.asarray(whole & ((micro_batches >= pp) | (space.rounds == "any")))


def _replicas(dp: int, inside: int, node_gpus: int) -> list[int]:
    """Return the numbers of groups that shard for themselves, each on whole nodes."""
    return [d for d in divisors(dp) if d == 1 or (dp // d * inside) % node_gpus == 0]


def tensor_degrees(model: Transformer, gpus: int, space: Space, largest: int) -> list[int]:
    """Return tensor-parallel degrees that divide heads, groups of keys and MLP, as frameworks want."""
    keys = model.kv_heads or model.heads
    return [
        d
        for d in divisors(gpus)
        if d <= min(space.tp, largest)
        and model.heads % d == 0
        and (keys == 1 or keys % d == 0)
        and model.ffn % d == 0
        and space.may("tp", d)
    ]


def _grids(
    model: Transformer, gpus: int, global_batch: int, space: Space, machine: Machine
) -> Iterator[dict[str, Column]]:
    """Yield the columns of all layouts of one (tp, cp, pp), by name; the global batch is the same for all."""
    node_gpus = machine.node_gpus
    for tp in tensor_degrees(model, gpus, space, machine.domain_gpus):
        for cp in (d for d in context_degrees(model, space) if (gpus // tp) % d == 0):
            for pp in (d for d in divisors(gpus // tp // cp) if d <= model.layers and space.may("pp", d)):
                dp = gpus // tp // cp // pp
                if global_batch % dp:
                    continue
                each = global_batch // dp
                micro = [d for d in divisors(each) if d <= space.micro_batch and space.may("micro_batch", d)]
                head = head_layers(model, pp) if space.uneven and pp > 1 else 0
                chunks = [d for d in _chunks(model.layers, pp, space, head) if space.may("vpp", d)]
                experts = [d for d in divisors(dp * cp * tp) if model.experts % d == 0] if model.experts else [1]
                experts = [d for d in experts if space.may("ep", d)]
                split = divisors(tp) if model.experts and space.expert_tp else [0]
                split = [d for d in split if space.may("etp", d)]
                copies = _replicas(dp, tp * cp, node_gpus) if space.replicas else [1]
                # Megatron-Core refuses experts beside tensor parallelism without sequence parallelism
                sequence = [0, 1] if space.sequence_parallel and not (model.experts and space.expert_tp) else [1]
                axes = {
                    "micro_batch": micro,
                    "vpp": chunks,
                    "ep": experts,
                    "etp": split,
                    "sequence_parallel": sequence if tp > 1 and space.sequence_parallel else [0],
                    "recompute": list(space.recompute),
                    "zero": [d for d in space.zero if pp == 1 or d in space.pipeline_zero] if dp * cp > 1 else [0],
                    "replicas": copies,
                    "schedule": list(space.schedules) if pp > 1 else [Schedule.ONE_F_ONE_B],
                    "offload": [Offload.NONE] if Offload.NONE in space.offload else list(space.offload),
                }
                mesh: tuple[NDArray[np.int64], ...] = np.meshgrid(*axes.values(), indexing="ij")
                grid = {name: axis.ravel().astype(float) for name, axis in zip(axes, mesh, strict=True)}
                legal = (grid["vpp"] == 1) | _makes_rounds(each / grid["micro_batch"], pp, space)
                legal &= (grid["schedule"] == Schedule.ONE_F_ONE_B) | (grid["vpp"] == 1)
                legal &= (grid["replicas"] == 1) | (grid["zero"] == 3)
                if len(split) > 1:
                    legal &= np.mod(dp * cp * tp, grid["ep"] * np.maximum(grid["etp"], 1)) == 0
                if Offload.NONE not in space.offload:
                    legal &= may_offload(grid["offload"], grid["zero"], grid["recompute"], space)
                # chunks of one size each, or stages without chunks
                whole = (grid["vpp"] == 1) | (np.mod(model.layers + head, pp * grid["vpp"]) == 0)
                grid["head_layers"] = np.where(whole, head, 0.0)
                kept = {name: axis[legal] for name, axis in grid.items()}
                same = {"tp": tp, "pp": pp, "dp": dp, "cp": cp}
                yield kept | {name: np.full(kept["vpp"].size, float(value)) for name, value in same.items()}


def may_offload(offload: Column, zero: Column, recompute: Column, space: Space) -> NDArray[np.bool_]:
    """Return where the framework can keep this in the host's memory."""
    optimizer = (np.mod(offload, 2) != Offload.OPTIMIZER) | np.isin(zero, space.offload_zero)
    return np.asarray(optimizer & ((offload < Offload.ACTIVATIONS) | np.isin(recompute, space.offload_recompute)))


def enumerate_layouts(model: Transformer, machine: Machine, gpus: int, global_batch: int, space: Space) -> Layouts:
    """Return every layout of the space, as columns; with offload only where the space has none without."""
    grids = list(_grids(model, gpus, global_batch, space, machine))
    if not grids:
        return Layouts.of([])
    columns = {name: np.concatenate([grid[name] for grid in grids]) for name in grids[0]}
    return Layouts(**columns, global_batch=np.array([float(global_batch)]))
