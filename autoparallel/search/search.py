"""All layouts of a number of GPUs: those that fit, ranked by iteration time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from resilio_hpc.autoparallel.base.columns import Column
from resilio_hpc.autoparallel.base.efficiency import Efficiency, shipped
from resilio_hpc.autoparallel.base.hardware import Machine, Machines
from resilio_hpc.autoparallel.base.layout import Layout, Layouts, Recompute, Schedule
from resilio_hpc.autoparallel.base.stack import Stack, Stacks
from resilio_hpc.autoparallel.cost.cost import Cost, Problem
from resilio_hpc.autoparallel.cost.memory import Memory, memory
from resilio_hpc.autoparallel.cost.schedule import rounds
from resilio_hpc.autoparallel.measure.nearby import Nearby, costed
from resilio_hpc.autoparallel.model.transformer import Transformer, Transformers

CHUNK = 16_384  # rows at once: the columns of a chunk stay in the processor's cache


@dataclass(frozen=True)
class Space:
    """The layouts to look at. ``micro_batch``, ``tp``: largest; ``cp``, ``zero``, ``recompute``: values (no cp: all).

    ``pipeline_zero``: stages of ZeRO that may be combined with pipeline parallelism. ``rounds``: micro-batches of an
    interleaved pipeline: "whole", a multiple of the stages; "longer", rounds of at least so many; or "any", also fewer
    than stages (``schedule.rounds``). ``replicas``: ZeRO-3 may shard within groups of whole nodes (HSDP). ``only``:
    degrees that are given, by name (tp, pp, ep, micro_batch, vpp).
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
    only: Mapping[str, int] = field(default_factory=dict)

    def may(self, name: str, value: int) -> bool:
        """Return whether the degree of this name may have this value."""
        return self.only.get(name, value) == value


@dataclass(frozen=True)
class Found:
    """Layouts that fit, fastest first, with their cost and memory; ``looked_at``: all, ``too_large``: the others.

    ``least_excess``: bytes by which the smallest layout misses the GPU when none fits, else 0.
    """

    layouts: Layouts
    cost: Cost
    memory: Memory
    looked_at: int
    too_large: int
    least_excess: float
    smallest: Layout | None


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


def _chunks(layers: int, pp: int, space: Space) -> list[int]:
    """Return numbers of chunks per stage; embedding and loss head may count as a layer each (``cost.stage_layers``)."""
    if pp == 1 or not space.interleaving:
        return [1]
    found = {d for count in (layers, layers + 2) if count % pp == 0 for d in divisors(count // pp)}
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
                chunks = [d for d in _chunks(model.layers, pp, space) if space.may("vpp", d)]
                experts = [d for d in divisors(dp * cp * tp) if model.experts % d == 0] if model.experts else [1]
                experts = [d for d in experts if space.may("ep", d)]
                copies = _replicas(dp, tp * cp, node_gpus) if space.replicas else [1]
                axes = {
                    "micro_batch": micro,
                    "vpp": chunks,
                    "ep": experts,
                    "sequence_parallel": [0, 1] if tp > 1 and space.sequence_parallel else [0],
                    "recompute": list(space.recompute),
                    "zero": list(space.zero) if dp * cp > 1 else [0],
                    "replicas": copies,
                    "schedule": list(space.schedules) if pp > 1 else [Schedule.ONE_F_ONE_B],
                }
                mesh: tuple[NDArray[np.int64], ...] = np.meshgrid(*axes.values(), indexing="ij")
                grid = {name: axis.ravel().astype(float) for name, axis in zip(axes, mesh, strict=True)}
                legal = (grid["vpp"] == 1) | _makes_rounds(each / grid["micro_batch"], pp, space)
                legal &= (grid["schedule"] == Schedule.ONE_F_ONE_B) | (grid["vpp"] == 1)
                legal &= (pp == 1) | np.isin(grid["zero"], space.pipeline_zero)
                legal &= (grid["replicas"] == 1) | (grid["zero"] == 3)
                kept = {name: axis[legal] for name, axis in grid.items()}
                same = {"tp": tp, "pp": pp, "dp": dp, "cp": cp}
                yield kept | {name: np.full(kept["vpp"].size, float(value)) for name, value in same.items()}


def enumerate_layouts(model: Transformer, machine: Machine, gpus: int, global_batch: int, space: Space) -> Layouts:
    """Return every layout of the space, as columns."""
    grids = list(_grids(model, gpus, global_batch, space, machine))
    if not grids:
        return Layouts.of([])
    columns = {name: np.concatenate([grid[name] for grid in grids]) for name in grids[0]}
    return Layouts(**columns, global_batch=np.array([float(global_batch)]))


def search(
    model: Transformer,
    machine: Machine,
    gpus: int,
    global_batch: int,
    stack: Stack | None = None,
    space: Space | None = None,
    efficiency: Efficiency | None = None,
    nearby: Nearby | None = None,
    headroom: float = 0.0,
) -> Found:
    """Look at every layout of the space; cost those that fit and sort them by iteration time.

    ``headroom``: part of a GPU's memory that must stay free.
    """
    models, machines = Transformers.of([model]), Machines.of([machine])
    stacks, known = Stacks.of([stack or Stack()]), efficiency or shipped()
    layouts = enumerate_layouts(model, machine, gpus, global_batch, space or Space())
    count = layouts.tp.size
    costs: list[Cost] = []
    memories: list[Memory] = []
    kept: list[NDArray[np.intp]] = []
    excess, smallest = np.inf, None
    for start in range(0, count, CHUNK):
        asked = Problem(models, _slice(layouts, slice(start, start + CHUNK)), machines, stacks)
        held = memory(asked)
        over = held.device - machines.memory * (1 - headroom)
        if over.size and over.min() < excess:
            excess, smallest = float(over.min()), start + int(over.argmin())
        fits = np.flatnonzero(over <= 0)
        if fits.size:
            some = replace(asked, layouts=_slice(asked.layouts, fits))
            costs.append(costed(some, known, nearby).full(fits.size))
            memories.append(held.take(fits))
            kept.append(fits + start)
    cost = Cost.joined(costs)
    order = np.argsort(cost.iteration, kind="stable")
    return Found(
        layouts=_slice(layouts, np.concatenate([np.zeros(0, dtype=np.intp), *kept])[order]),
        cost=cost.take(order),
        memory=Memory.joined(memories).take(order),
        looked_at=count,
        too_large=count - order.size,
        least_excess=0.0 if kept else max(excess, 0.0),
        smallest=layouts.row(smallest) if smallest is not None else None,
    )


def _slice(layouts: Layouts, rows: slice | NDArray[np.intp]) -> Layouts:
    """Return these rows; columns with one value for all rows stay so."""
    columns = {f.name: getattr(layouts, f.name) for f in fields(Layouts)}
    return Layouts(**{name: value if name == "global_batch" else value[rows] for name, value in columns.items()})
