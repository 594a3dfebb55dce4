"""The answer of ``resilio plan``'s searches, and its parts as JSON."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from resilio_hpc.autoparallel.search.choice import Choice, Offer
from resilio_hpc.autoparallel.search.ranking import Searched, pareto, ranked


@dataclass(frozen=True)
class PlanAnswer:
    """The answer. ``choices``: ranked, one per shape; ``front``: those that no other beats.

    ``took_s``: of the search; ``best``: the fastest layouts of the first choice's shape.
    """

    choices: list[Choice]
    front: list[Choice]
    searched: list[Searched]
    took_s: float
    best: list[Choice] = field(default_factory=list)


def answered(searched: list[Searched], rank: str, start_s: float) -> PlanAnswer:
    """Return the answer of a search that began then (``time.perf_counter``)."""
    choices = ranked(searched, rank)
    best = next((one.best for one in searched if choices and one.offer == choices[0].offer), ())
    return PlanAnswer(choices, pareto(searched), searched, time.perf_counter() - start_s, list(best))


def answer_json(found: PlanAnswer, rank: str, cost: str) -> dict[str, Any]:
    """Return numbers in seconds, bytes and shares of the iteration; null where nothing is known or nothing ends."""
    return {
        "rank": rank,
        "cost": cost,
        "layouts_looked_at": sum(one.looked_at for one in found.searched),
        "search_s": round(found.took_s, 4),
        "choices": [choice_json(one) for one in found.choices],
        "pareto": [choice_json(one) for one in found.front],
        "best_of_first_shape": [choice_json(one) for one in found.best],
        "none_fits": [lost_shape_json(one) for one in found.searched if not one.choices],
    }


def choice_json(one: Choice) -> dict[str, Any]:
    """Return a choice, with the arguments of its job."""
    numbers = ("iteration_s", "low_s", "high_s", "mfu", "bubble", "communication", "memory_bytes", "gpu_bytes",
               "tokens_s", "flops_s",
               "overhead", "run_s", "gpu_hours", "finish_s")  # fmt: skip
    named = ("recompute", "schedule", "offload")
    layout = {name: int(value) for name, value in asdict(one.layout).items() if name not in named}
    return {
        **_offer_json(one.offer),
        "gpus": one.gpus,
        "layout": str(one.layout),
        "degrees": {**layout, **{name: getattr(one.layout, name).name.lower() for name in named}},
        **{name: _number(getattr(one, name)) for name in numbers},
        "environment": one.environment(),
        "sbatch": one.sbatch_options(),
        "launch": one.launch_arguments(),
        **({} if one.stages is None else {"stages": list(one.stages)}),
    }


def _offer_json(offer: Offer) -> Mapping[str, Any]:
    shape = {"nodes": offer.shape.nodes, "gpus_per_node": offer.shape.ranks_per_node}
    rest = {"partition": offer.partition, "gpu": offer.gpu, "start": offer.start, "wait_s": offer.wait_s}
    return {**shape, **rest, "marks": list(offer.marks)}


def lost_shape_json(one: Searched) -> dict[str, Any]:
    """Return a shape without a layout that fits."""
    return {**_offer_json(one.offer), "looked_at": one.looked_at, "least_excess_bytes": _number(one.least_excess)}


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
