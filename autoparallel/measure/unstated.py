"""What a row leaves open: micro-batch, interleaving, recomputation, ZeRO. Taken is the fastest that fits into the GPU.

A published run was tuned: its makers tried these, and kept the best that ran.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from resilio_hpc.autoparallel.base.efficiency import shipped
from resilio_hpc.autoparallel.base.hardware import Machines
from resilio_hpc.autoparallel.base.layout import Layout, Layouts, Recompute
from resilio_hpc.autoparallel.base.stack import Stacks
from resilio_hpc.autoparallel.cost.cost import Problem, iteration
from resilio_hpc.autoparallel.cost.memory import memory
from resilio_hpc.autoparallel.measure.rows import Case
from resilio_hpc.autoparallel.model.transformer import Transformers

LARGEST_MICRO_BATCH = 16
KINDS = (Recompute.NONE, Recompute.SELECTIVE, Recompute.ALTERNATE, Recompute.FULL)


def problem(cases: Sequence[Case]) -> Problem:
    """Return the cases as columns."""
    return Problem(
        Transformers.of([c.model for c in cases]),
        Layouts.of([c.layout for c in cases]),
        Machines.of([c.machine for c in cases]),
        Stacks.of([c.stack for c in cases]),
    )


def filled(cases: Sequence[Case]) -> list[Case]:
    """Return the cases with nothing open. Where nothing fits, it is what needs least memory."""
    done = list(cases)
    ways = [(number, way) for number, found in enumerate(cases) if found.open for way in _ways(found)]
    if not ways:
        return done
    asked = problem([way for _, way in ways])
    times = iteration(asked, shipped()).iteration
    over = np.maximum(memory(asked).least - asked.machines.memory, 0.0)  # it ran, if only just
    best: dict[int, tuple[float, float]] = {}
    for row, (number, way) in enumerate(ways):
        key = float(over[row]), float(times[row])
        if number not in best or key < best[number]:
            best[number] = key
            done[number] = way
    return [_noted(found) if found.open else found for found in done]


def _ways(found: Case) -> Iterator[Case]:
    layout, model = found.layout, found.model
    each = max(1, layout.global_batch // layout.dp)
    divided = [d for d in range(1, min(each, LARGEST_MICRO_BATCH) + 1) if each % d == 0]
    # layers that no stage has evenly: embedding and head count as one each (cost.stage_layers)
    even = model.layers if model.layers % layout.pp == 0 else model.layers + 2
    chunks = [d for d in range(layout.vpp, even // layout.pp + 1) if even % (layout.pp * d) == 0] or [layout.vpp]
    for micro in divided if "micro_batch" in found.open else (layout.micro_batch,):
        for vpp in chunks if "vpp" in found.open else (layout.vpp,):
            tried = replace(layout, micro_batch=micro, vpp=vpp)
            if vpp > 1 and "vpp" in found.open and tried.micro_batches % layout.pp:
                continue  # interleaving needs whole rounds
            yield from (replace(found, layout=one) for one in _kinds(tried, found))
    if "vpp" in found.open and layout.vpp > 1:  # where no number of chunks makes whole rounds
        yield from (replace(found, layout=one) for one in _kinds(replace(layout, vpp=1), found))


def _kinds(layout: Layout, found: Case) -> Iterator[Layout]:
    for kind in KINDS if "recompute" in found.open else (layout.recompute,):
        for zero in (0, 1) if "zero" in found.open else (layout.zero,):
            yield replace(layout, recompute=kind, zero=zero)


def _noted(found: Case) -> Case:
    layout = found.layout
    kinds = {"recompute": layout.recompute.name.lower(), "zero": layout.zero}
    kinds |= {"micro_batch": layout.micro_batch, "vpp": layout.vpp}
    known = [one for one in found.assumed if one.partition("=")[0] not in found.open]
    return replace(found, assumed=(*known, *(f"{name}={kinds[name]}" for name in sorted(found.open))))
