"""Why the other layouts of a shape lost: one answer for each class of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from resilio_hpc.autoparallel.base.hardware import Machine
from resilio_hpc.autoparallel.base.layout import TITLES, Layout, Layouts
from resilio_hpc.autoparallel.cost.cost import Cost
from resilio_hpc.autoparallel.cost.memory import Memory
from resilio_hpc.autoparallel.search.ranking import Training, find, rows_of
from resilio_hpc.autoparallel.search.search import Found

Rows: TypeAlias = NDArray[np.intp]
_PARTS = {
    "compute": "computing",
    "tensor_parallel": "tensor parallel traffic",
    "expert_parallel": "expert parallel traffic",
    "context_parallel": "context parallel traffic",
    "pipeline_transfers": "pipeline transfers",
    "bubble": "pipeline bubble",
    "data_parallel": "data parallel traffic",
    "optimizer": "optimizer step",
    "host": "launching of kernels",
    "offload": "copies to the host's memory",
}


@dataclass(frozen=True)
class Loser:
    """The nearest layout of a class. ``others``: the difference of the class, empty for those that do not fit.

    ``slower``: additional time as a share of the best, below 0 where it would be faster; ``excess_bytes``: by which it
    does not fit, 0 where it does; ``because``: the part of the iteration that grows most.
    """

    others: tuple[str, ...]
    count: int
    layout: Layout
    slower: float
    excess_bytes: float
    because: str

    def line(self) -> str:
        """Return it as a line for a person."""
        if self.excess_bytes > 0:
            pace = f"{-self.slower:.1%} faster" if self.slower < 0 else f"{self.slower:.1%} slower"
            size = f"{self.excess_bytes / 2**30:.1f} GiB"
            return f"{self.count:,} do not fit: {self.layout}, {pace}, is too large by {size}"
        why = f": more {self.because}" if self.because else ""
        other = ", ".join(self.others)
        return f"{self.count:,} with other {other}: the best, {self.layout}, is {self.slower:.1%} slower{why}"


def rejected_candidates(training: Training, machine: Machine, gpus: int) -> list[Loser]:
    """Return, for so many GPUs, layouts that do not fit, and those that differ from the best one, by degree."""
    every = _with_offload(find(training, replace(machine, memory_gb=1e9), gpus), training, machine, gpus)
    over = every.memory.device - machine.memory_gb * 1e9 * (1 - training.headroom)
    fitting = np.flatnonzero(over <= 0)
    if not fitting.size:
        return []
    best = int(fitting[0])
    return [*_too_large(every, over, best), *_slower(every, best, fitting)]


def _with_offload(every: Found, training: Training, machine: Machine, gpus: int) -> Found:
    """Return these with the layouts that fit since something is in the host's memory, the fastest first."""
    if len(training.space.offload) == 1:
        return every
    real = find(training, machine, gpus)
    moved = np.flatnonzero(real.layouts.offload > 0) if real.cost.iteration.size else np.zeros(0, dtype=np.intp)
    if not moved.size:
        return every
    some = rows_of(real, moved.tolist())
    cost = Cost.joined([every.cost, some.cost])
    order = np.argsort(cost.iteration, kind="stable")
    layouts = Layouts.joined([one.layouts.full(len(one.layouts)) for one in (every, some)]).take(order)
    held = Memory.joined([every.memory, some.memory]).take(order)
    return replace(every, cost=cost.take(order), layouts=layouts, memory=held)


def _too_large(every: Found, over: NDArray[np.float64], best: int) -> list[Loser]:
    """Return, of those that would be faster, the one that lacks least; of all, where none would be."""
    large = np.flatnonzero(over > 0)
    if not large.size:
        return []
    wanted = large[large < best] if np.any(large < best) else large
    row = int(wanted[np.argmin(over[wanted])])
    return [_loser(every, (), int(large.size), row, best, float(over[row]))]


def _slower(every: Found, best: int, fitting: Rows) -> list[Loser]:
    """Return the slower classes; those whose best layout is the same one are joined."""
    together: dict[int, list[str]] = {}
    members: dict[int, set[int]] = {}
    for name, words in TITLES.items():
        column = getattr(every.layouts, name)
        others = fitting[column[fitting] != column[best]]
        if others.size:
            together.setdefault(int(others[0]), []).append(words)
            members.setdefault(int(others[0]), set()).update(map(int, others))
    return [_loser(every, together[row], len(members[row]), row, best, 0.0) for row in sorted(together)]


def _loser(every: Found, others: Sequence[str], count: int, row: int, best: int, excess: float) -> Loser:
    times = every.cost.iteration
    slower = float(times[row] / times[best] - 1)
    because = _grown(every.cost, row, best) if slower > 0 else ""
    return Loser(tuple(others), count, every.layouts.row(row), slower, excess, because)


def _grown(cost: Cost, row: int, best: int) -> str:
    grown = {words: float(getattr(cost, name)[row] - getattr(cost, name)[best]) for name, words in _PARTS.items()}
    return max(grown, key=lambda words: grown[words])
