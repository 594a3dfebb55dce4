"""What a run cost: node-hours, and GPU-hours where it is known how many GPUs a node has. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from resilio_hpc.core.json_fields import Fields
from resilio_hpc.report.accounting.causes import US, TimeCause
from resilio_hpc.report.accounting.node_time import NodeTime

_GPU = re.compile(r"gpu_\w+\{(?:.*,)?gpu=([^,}]+)")


@dataclass(frozen=True)
class RunCost:
    """Hours of nodes by cause. ``gpus_per_node``: None where not known; then GPU-hours are unknown, too."""

    node_hours: dict[TimeCause, float]
    gpus_per_node: int | None

    @property
    def total_node_hours(self) -> float:
        """Return the node-hours of all causes."""
        return sum(self.node_hours.values())

    @property
    def unit(self) -> str:
        """Return what ``hours`` counts."""
        return "GPU-hours" if self.gpus_per_node else "node-hours"

    def hours(self, *causes: TimeCause) -> float:
        """Return the GPU-hours of these causes; node-hours where no GPU is known."""
        return sum(self.node_hours[cause] for cause in causes or TimeCause) * (self.gpus_per_node or 1)


def run_cost(time: NodeTime, gpus_per_node: int | None) -> RunCost:
    """Return the cost."""
    return RunCost({cause: us / US / 3600 for cause, us in time.by_cause.items()}, gpus_per_node)


def gpus_per_node(samples: Iterable[Mapping[str, object]]) -> int | None:
    """Return how many GPUs each node has, from the newest samples of nodes; None where they differ, or have none."""
    counts = {
        len({found[1] for name in Fields.of(sample.get("values")).data if (found := _GPU.match(name))})
        for sample in samples
    }
    count = counts.pop() if len(counts) == 1 else 0
    return count or None
