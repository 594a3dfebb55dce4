"""All layouts of a number of GPUs: those that fit, ranked by iteration time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from resilio_hpc.autoparallel.base.columns import Column
from resilio_hpc.autoparallel.base.efficiency import Efficiency, shipped
from resilio_hpc.autoparallel.base.hardware import Machine, Machines
from resilio_hpc.autoparallel.base.layout import Layout, Layouts, Offload
from resilio_hpc.autoparallel.base.stack import Stack, Stacks
from resilio_hpc.autoparallel.cost.cost import Cost, Problem
from resilio_hpc.autoparallel.cost.memory import Memory, memory
from resilio_hpc.autoparallel.cost.offload import HOST_SHARE
from resilio_hpc.autoparallel.measure.nearby import Nearby, costed
from resilio_hpc.autoparallel.model.transformer import Transformer, Transformers
from resilio_hpc.autoparallel.search.layout_space import Space, enumerate_layouts, may_offload

CHUNK = 16_384  # rows at once: the columns of a chunk stay in the processor's cache


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
    asked = space or Space()
    known = efficiency or shipped()
    layouts = enumerate_layouts(model, machine, gpus, global_batch, asked)
    setting = Problem(Transformers.of([model]), layouts, Machines.of([machine]), Stacks.of([stack or Stack()]))
    looking = _Looking(setting, known, nearby, 1 - headroom)
    large = looking.look(layouts)
    kinds = [kind for kind in asked.offload if kind and Offload.NONE in asked.offload]
    if kinds and (asked.offload_ranked or looking.empty):
        looking.offloaded(_slice(layouts, large), kinds, asked)
    return looking.found()


class _Looking:
    """The layouts that were looked at, with the costs of those that fit. ``room``: part of a GPU's memory."""

    def __init__(self, setting: Problem, known: Efficiency, nearby: Nearby | None, room: float) -> None:
        self._setting, self._known, self._nearby = setting, known, nearby
        self._room = setting.machines.memory * room
        self._layouts: list[Layouts] = []
        self._costs: list[Cost] = []
        self._memories: list[Memory] = []
        self._count, self._excess = 0, math.inf
        self._smallest: tuple[Layouts, int] | None = None

    @property
    def empty(self) -> bool:
        """Return whether nothing fits so far."""
        return not self._costs

    def look(self, layouts: Layouts) -> NDArray[np.intp]:
        """Keep those that fit, and return the places of the others."""
        others = [np.zeros(0, dtype=np.intp)]
        for start in range(0, layouts.tp.size, CHUNK):
            some = _slice(layouts, slice(start, start + CHUNK))
            held = memory(replace(self._setting, layouts=some))
            over = self._over(held)
            least = int(over.argmin())
            if over[least] < self._excess:
                self._excess, self._smallest = float(over[least]), (some, least)
            fits = np.flatnonzero(over <= 0)
            if fits.size:
                self._keep(_slice(some, fits), held.take(fits))
            others.append(np.flatnonzero(over > 0) + start)
        self._count += layouts.tp.size
        return np.concatenate(others)

    def offloaded(self, layouts: Layouts, kinds: Sequence[Offload], space: Space) -> None:
        """Look at layouts that do not fit as they are, with something in the host's memory.

        Nothing of that makes an iteration shorter. So the best needs no offload unless a layout that is too large would
        be faster; only such ones are looked at, once it is seen that they can be made to fit.
        """
        best = min((float(cost.iteration.min()) for cost in self._costs), default=math.inf)
        for start in range(0, layouts.tp.size, CHUNK):
            some = _slice(layouts, slice(start, start + CHUNK))
            ways = [self._legal(some, kind, space) for kind in kinds]
            able = np.zeros(some.tp.size, dtype=bool)
            for way, rows in ways:
                able[rows] |= self._over(memory(replace(self._setting, layouts=way))) <= 0
            rest = np.flatnonzero(able)
            if rest.size and best < math.inf:
                without = costed(replace(self._setting, layouts=_slice(some, rest)), self._known, self._nearby)
                rest = rest[without.iteration < best]
            for way, rows in ways:
                wanted = np.isin(rows, rest) if best < math.inf else np.ones(rows.size, dtype=bool)
                if np.any(wanted):
                    self.look(_slice(way, np.flatnonzero(wanted)))

    def found(self) -> Found:
        """Return what was kept, the fastest first."""
        cost = Cost.joined(self._costs)
        order = np.argsort(cost.iteration, kind="stable")
        kept = [one.full(len(one)) for one in self._layouts]
        layouts = Layouts.joined(kept) if kept else _slice(self._setting.layouts, order)
        return Found(
            layouts=layouts.take(order) if kept else layouts,
            cost=cost.take(order),
            memory=Memory.joined(self._memories).take(order),
            looked_at=self._count,
            too_large=self._count - order.size,
            least_excess=0.0 if kept else max(self._excess, 0.0),
            smallest=self._smallest[0].row(self._smallest[1]) if self._smallest else None,
        )

    def _over(self, held: Memory) -> Column:
        """Return the bytes by which layouts miss the GPU, or the host, where that is more; below 0 where they fit."""
        return np.maximum(held.device - self._room, held.host - self._setting.machines.host_memory * HOST_SHARE)

    def _legal(self, layouts: Layouts, kind: Offload, space: Space) -> tuple[Layouts, NDArray[np.intp]]:
        """Return those of the layouts that may have this kind of offload, with it; and their places."""
        offload = np.full(layouts.tp.size, float(kind))
        rows = np.flatnonzero(may_offload(offload, layouts.zero, layouts.recompute, space))
        return replace(_slice(layouts, rows), offload=offload[rows]), rows

    def _keep(self, layouts: Layouts, held: Memory) -> None:
        count = layouts.tp.size
        asked = replace(self._setting, layouts=layouts)
        self._layouts.append(layouts)
        self._costs.append(costed(asked, self._known, self._nearby).full(count))
        self._memories.append(held)


def _slice(layouts: Layouts, rows: slice | NDArray[np.intp]) -> Layouts:
    """Return these rows; columns with one value for all rows stay so."""
    columns = {f.name: getattr(layouts, f.name) for f in fields(Layouts)}
    return Layouts(**{name: value if name == "global_batch" else value[rows] for name, value in columns.items()})
