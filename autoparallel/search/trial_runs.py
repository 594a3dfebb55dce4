"""Short runs that tell most of a cluster: layouts that the search finds for it, and those of them to measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from resilio_hpc.autoparallel.base.hardware import Machine
from resilio_hpc.autoparallel.measure.calibrate import ChosenRuns, choose_runs
from resilio_hpc.autoparallel.measure.measured import measured_names
from resilio_hpc.autoparallel.measure.rows import Case
from resilio_hpc.autoparallel.search.choice import Choice, Offer
from resilio_hpc.autoparallel.search.failures import Reliability
from resilio_hpc.autoparallel.search.ranking import Training, at_shape, choices_of, find, rows_of
from resilio_hpc.autoparallel.search.search import Found

SHAPES = 8  # of a long list of shapes: as many, from the smallest to the largest
NEAR = 1.25  # of a shape's best time: layouts that a plan may have to tell apart
FAR = 2.0  # slower ones are not worth a run
NEAREST, OTHERS = 60, 60  # layouts of a shape: the fastest, and the fastest of other kinds
_KIND = ("tp", "pp", "cp", "ep", "micro_batch", "recompute", "zero")


@dataclass(frozen=True)
class TrialRun:
    """A layout that may be run. ``target``: a plan may have to tell it from the best one of its shape."""

    choice: Choice
    case: Case
    target: bool


def trial_runs(
    offers: Sequence[Offer], training: Training, machines: Mapping[str, Machine], framework: str
) -> list[TrialRun]:
    """Return layouts of the offered shapes: the fastest of each, and the fastest of each other kind of layout."""
    found = list[TrialRun]()
    for offer in _spread(offers):
        machine = at_shape(machines[offer.gpu], offer.shape.ranks_per_node)
        every = find(training, machine, offer.shape.ranks)
        some = rows_of(every, _of_each_kind(every))
        for choice in choices_of(offer, some, training, machine, Reliability()):
            case = Case(training.model, choice.layout, machine, training.stack, framework)
            found.append(TrialRun(choice, case, choice.iteration_s <= NEAR * float(every.cost.iteration[0])))
    return found


def chosen(runs: Sequence[TrialRun], training: Training, count: int, most_gpus: int = 0) -> ChosenRuns:
    """Return the runs that tell most of the targets' times. ``most_gpus``: of a chosen run, 0 for any number.

    What a profile has measured needs no run.
    """
    allowed = [not most_gpus or one.choice.gpus <= most_gpus for one in runs]
    known = next((training.efficiency_on(one.case.machine) for one in runs), training.efficiency)
    fixed = measured_names(known, training.efficiency) if training.measured else frozenset[str]()
    return choose_runs(known, [one.case for one in runs], count, [one.target for one in runs], allowed, fixed=fixed)


def _spread(offers: Sequence[Offer]) -> list[Offer]:
    """Return at most ``SHAPES`` offers, one of each shape and GPU, spread evenly over their numbers of ranks."""
    shapes = {(one.gpu, one.shape): one for one in sorted(offers, key=lambda one: (one.shape.ranks, one.shape.nodes))}
    every = list(shapes.values())
    if len(every) <= SHAPES:
        return every
    return [every[place] for place in np.linspace(0, len(every) - 1, SHAPES).round().astype(int)]


def _of_each_kind(found: Found) -> list[int]:
    """Return rows: the fastest, and the fastest of each other kind that is not much slower."""
    times = found.cost.iteration
    near = np.flatnonzero(times <= FAR * times[0]) if times.size else np.zeros(0, dtype=int)
    rows, kinds = list[int](), set[tuple[float, ...]]()
    columns = [np.broadcast_to(getattr(found.layouts, name), times.shape) for name in _KIND]
    for row in map(int, near):
        kind = tuple(float(column[row]) for column in columns)
        if row < NEAREST or (kind not in kinds and len(rows) < NEAREST + OTHERS):
            rows.append(row)
        kinds.add(kind)
    return rows
