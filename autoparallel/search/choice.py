"""One ranked answer of the search: a shape, its layout, its prediction, and its form for a job. RES-21."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from resilio_hpc.autoparallel.base.layout import Layout
from resilio_hpc.autoparallel.base.shapes import Shape

Start = Literal["now", "soon", "ever"]
PART = "part of nodes"


@dataclass(frozen=True)
class Offer:
    """A shape that a partition has room for. ``gpu``: Slurm's name of the GPU's type, "" without.

    ``start``: "now", "soon" (when the jobs there have reached their limits) or "ever" (large enough, start unknown);
    ``wait_s``: until then, None where unknown. ``marks``: "over-subscribed", "preemptible", "part of nodes": the shape
    leaves GPUs of its nodes to others.
    """

    shape: Shape
    partition: str
    gpu: str
    start: Start = "now"
    wait_s: float | None = 0.0
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """An offer with a layout. Seconds, bytes; shares are parts of the iteration.

    ``low_s`` to ``high_s``: the uncertainty band of ``iteration_s``. ``memory_bytes``: of the fullest GPU, of which it
    has ``gpu_bytes``. ``tokens_s``, ``flops_s``: of one GPU, per second, of the model's FLOPs alone. ``overhead``: part
    of the time that checkpoints, failures and restarts take; ``run_s``: the whole run with them, or 1,000 iterations
    where its length is not known; infinite where failures never let it end. ``stages``: of a traced module, the parts
    with which the pipeline stages after the first begin; None of a described model.
    """

    offer: Offer
    layout: Layout
    iteration_s: float
    low_s: float
    high_s: float
    mfu: float
    bubble: float
    communication: float
    memory_bytes: float
    gpu_bytes: float
    overhead: float = 0.0
    run_s: float = 0.0
    tokens_s: float = 0.0
    flops_s: float = 0.0
    stages: tuple[str, ...] | None = None

    @property
    def gpus(self) -> int:
        return self.offer.shape.ranks

    @property
    def gpu_hours(self) -> float:
        """Return the GPU hours of the run."""
        return self.gpus * self.run_s / 3600

    @property
    def finish_s(self) -> float:
        """Return seconds from now: the wait and the run; the run alone where the wait is not known."""
        return (self.offer.wait_s or 0.0) + self.run_s

    @property
    def headroom_bytes(self) -> float:
        return self.gpu_bytes - self.memory_bytes

    def words(self) -> dict[str, str]:
        """Return the layout by the names of its parts in commands and scripts.

        As in the launcher, dp includes context-parallel ranks.
        """
        layout = self.layout
        other = ("schedule", "recompute", "offload")
        numbers = {one.name: int(getattr(layout, one.name)) for one in fields(layout) if one.name not in other}
        numbers |= {"dp": layout.dp * layout.cp, "accumulation": layout.micro_batches}
        named = {"recompute": layout.recompute.name.lower(), "offload": layout.offload.name.lower()}
        return {name: str(value) for name, value in numbers.items()} | named

    def environment(self) -> dict[str, str]:
        """Return the variables that the training script reads."""
        found = {f"RESILIO_{name.upper()}": value for name, value in self.words().items()}
        return found if self.stages is None else {**found, "RESILIO_STAGES": ",".join(self.stages)}

    def launch_arguments(self) -> list[str]:
        """Of resilio-launch, which gives the ranks RESILIO_TP, RESILIO_PP and RESILIO_DP in each round."""
        degrees = f"tp={self.layout.tp},pp={self.layout.pp}"
        return ["--nproc-per-node", str(self.offer.shape.ranks_per_node), "--layout", degrees]

    def sbatch_options(self) -> dict[str, str]:
        """Return the options by the keys of ``resilio submit``."""
        offer = self.offer
        # without a cluster, the name of the GPU is the planner's, which Slurm need not know
        known = offer.gpu and offer.partition
        gpus = f"{offer.gpu}:{offer.shape.ranks_per_node}" if known else str(offer.shape.ranks_per_node)
        options = {"nodes": str(offer.shape.nodes), "gpus_per_node": gpus}
        if PART in offer.marks:
            options["exclusive"] = "false"
        return {**options, "partition": offer.partition} if offer.partition else options
