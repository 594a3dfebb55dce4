"""Time and memory of given layouts: rows of a table in, the same rows with predictions out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from resilio_hpc.autoparallel.base.efficiency import Efficiency
from resilio_hpc.autoparallel.cost.cost import Cost, Problem
from resilio_hpc.autoparallel.cost.memory import Memory, memory
from resilio_hpc.autoparallel.measure.measured import apply_each
from resilio_hpc.autoparallel.measure.nearby import Nearby, costed
from resilio_hpc.autoparallel.measure.profile import Profile
from resilio_hpc.autoparallel.measure.rows import Case, case
from resilio_hpc.autoparallel.measure.unstated import filled, problem
from resilio_hpc.core.compat import tomllib
from resilio_hpc.core.errors import UsageError

COLUMNS = (
    "pred_iter_time_s",
    "pred_iter_low_s",
    "pred_iter_high_s",
    "pred_memory_gb",
    "pred_fits",
    "pred_tflops_per_gpu",
    "pred_note",
)
GIB = 2**30


@dataclass(frozen=True)
class ParsedRows:
    """Rows, understood or not: ``cases[i]`` belongs to row ``index[i]``; ``notes``: why the others are not."""

    cases: list[Case]
    index: list[int]
    notes: dict[int, str]


def read(rows: Sequence[Mapping[str, str]]) -> ParsedRows:
    """Return the rows as cases; what they leave open is the fastest that fits into the GPU (``unstated.py``)."""
    done = ParsedRows([], [], {})
    for number, row in enumerate(rows):
        try:
            done.cases.append(case(row))
            done.index.append(number)
        except UsageError as error:
            done.notes[number] = str(error)
    return replace(done, cases=filled(done.cases))


@cache
def band() -> Mapping[str, float]:
    """Return the half-widths of the band in the logarithm of the time, and the share of measurements within it."""
    text = files("resilio_hpc.autoparallel.measure").joinpath("band.toml").read_text()
    return {key: float(value) for key, value in tomllib.loads(text).items() if key != "source"}


def half_width(asked: Problem, cost: Cost, calibrated: bool) -> NDArray[np.float64]:
    """Return the half-width of the band around each time: wider for launch-bound kernels, and for experts."""
    table = band()
    launching = cost.host > 0.3 * cost.iteration
    width = np.where(
        asked.models.experts > 0, table["experts"], np.where(launching, table["launching"], table["plain"])
    )
    return np.where(calibrated, width * table["calibrated"], width)


@dataclass(frozen=True)
class Prediction:
    """The predictions for all cases, in order."""

    problem: Problem
    cost: Cost
    memory: Memory
    half_width: NDArray[np.float64]


def predict(
    cases: Sequence[Case], efficiency: Efficiency, calibrated: bool = False, nearby: Nearby | None = None
) -> Prediction:
    """Return time and memory of these cases. ``nearby``: measurements of this cluster."""
    asked = problem(cases)
    cost = costed(asked, efficiency, nearby)
    return Prediction(asked, cost, memory(asked), half_width(asked, cost, calibrated))


def _memory_gb(found: Prediction, number: int, kind: str) -> float:
    """Return memory of the row's kind: GiB or GB; allocated, held by the allocator, or all; of which rank."""
    kind = kind.lower()
    held, capacity = found.memory, found.problem.machines.memory
    if "smi" in kind:
        return float(held.seen(capacity)[number]) / GIB
    reported = "reserved" if found.problem.stacks.reports_reserved[number] else "allocated"
    if "reserved" in kind or ("allocated" not in kind and reported == "reserved"):
        size = held.reserved(capacity)
    else:
        size = held.last if "rank that logs" in kind else held.peak
    return float(size[number]) / (GIB if "gib" in kind else 1e9)


def _noted(noted: Sequence[str]) -> str:
    measured = [one for one in noted if one.startswith("profile: ")]
    assumed = [one for one in noted if one not in measured]
    return "; ".join([*([f"assumed {', '.join(assumed)}"] if assumed else []), *measured])


def cells(found: Prediction, number: int, row: Mapping[str, str], noted: Sequence[str]) -> dict[str, str]:
    """Return the new cells of one row."""
    time = float(found.cost.iteration[number])
    if not math.isfinite(time) or time <= 0:
        return {**dict.fromkeys(COLUMNS, ""), "pred_note": "no finite time: are the numbers of this row possible?"}
    layouts, models = found.problem.layouts, found.problem.models
    tokens = layouts.global_batch[number] * models.seq[number]
    flops = models.flops_per_token[number] * tokens / time / layouts.num_gpus[number]
    spread = math.exp(float(found.half_width[number]))
    fits = found.memory.least[number] <= found.problem.machines.memory[number]
    values = (time, time / spread, time * spread, _memory_gb(found, number, row.get("memory_kind") or ""))
    texts = [f"{value:.6g}" for value in values]
    note = _noted(noted)
    return dict(zip(COLUMNS, [*texts, str(int(fits)), f"{flops / 1e12:.4g}", note], strict=True))


def as_measured(cases: Sequence[Case], efficiency: Efficiency, profile: Profile) -> tuple[list[Case], list[Efficiency]]:
    """Return machines and efficiencies of a measured profile; its notes join the assumptions."""
    measured = apply_each(profile, [one.machine for one in cases], efficiency)
    changed = [
        replace(one, machine=machine, assumed=(*one.assumed, *notes))
        for one, (machine, _, notes) in zip(cases, measured, strict=True)
    ]
    return changed, [own for _, own, _ in measured]


def predict_rows(
    rows: Sequence[Mapping[str, str]],
    efficiency: Efficiency,
    calibrated: bool = False,
    nearby: Nearby | None = None,
    profile: Profile | None = None,
) -> list[dict[str, str]]:
    """Return every row with the columns of ``COLUMNS``; ``pred_note`` says why a row cannot be predicted."""
    understood = read(rows)
    cases, efficiencies = understood.cases, [efficiency] * len(understood.cases)
    if profile is not None:
        cases, efficiencies = as_measured(cases, efficiency, profile)
    done = [{**row, **dict.fromkeys(COLUMNS, "")} for row in rows]
    for number, why in understood.notes.items():
        done[number]["pred_note"] = why
    for known in dict.fromkeys(efficiencies):
        places = [place for place, own in enumerate(efficiencies) if own == known]
        found = predict([cases[place] for place in places], known, calibrated, nearby)
        for at, place in enumerate(places):
            number = understood.index[place]
            done[number].update(cells(found, at, rows[number], cases[place].assumed))
    return done
