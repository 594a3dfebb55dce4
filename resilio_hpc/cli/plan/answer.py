"""The answer of ``resilio plan``'s searches, and its parts as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from resilio_hpc.autoparallel.search.choice import Choice, Offer
from resilio_hpc.autoparallel.search.ranking import Searched


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
