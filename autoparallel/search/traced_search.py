"""Every offered shape with the layouts of any torch module: data parallel with ZeRO, and pipeline stages. Pure. RES-19.

Such a module has no known heads or experts, so tensor, context and expert parallelism are not looked at. Its stages are
those of the exact partition, cut between its repeated blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from resilio_hpc.autoparallel.base.efficiency import Efficiency
from resilio_hpc.autoparallel.base.hardware import Machine
from resilio_hpc.autoparallel.base.layout import Layout, Recompute
from resilio_hpc.autoparallel.base.stack import Stack
from resilio_hpc.autoparallel.cost.operator_times import OperatorSeconds, operator_seconds
from resilio_hpc.autoparallel.cost.traced_cost import (
    StageHoldings,
    StageTimes,
    TracedSetting,
    holdings,
    stage_sums,
    traced_costs,
)
from resilio_hpc.autoparallel.measure.predict import band
from resilio_hpc.autoparallel.model.traced_model import TracedModel
from resilio_hpc.autoparallel.search.choice import Choice, Offer
from resilio_hpc.autoparallel.search.failures import Reliability, overhead, run_s
from resilio_hpc.autoparallel.search.layout_space import Space, divisors
from resilio_hpc.autoparallel.search.partition import NoPartition, StagePartition, partition
from resilio_hpc.autoparallel.search.ranking import BEST, STEP_OF_MEMORY, Searched, at_shape, peak_flops
from resilio_hpc.core.errors import UsageError

EVEN = 0.05  # FLOPs of all stages within this part of their mean, where the blocks allow it


@dataclass(frozen=True)
class TracedTraining:
    """The training of a traced model. ``global_batch``: samples; the rest as in ``ranking.Training``."""

    model: TracedModel
    global_batch: int
    efficiency: Efficiency
    stack: Stack
    space: Space
    measured: Mapping[str, Efficiency] = field(default_factory=dict)
    headroom: float = 0.0


@dataclass(frozen=True)
class _Costed:
    layout: Layout
    time_s: float
    bubble_s: float
    moving_s: float
    memory: float


class TracedSearch:
    """Searches offers. What several shapes share, stages and their times, is worked out once."""

    def __init__(self, training: TracedTraining) -> None:
        self._training = training
        self._stages: dict[int, StagePartition | None] = {}
        self._held: dict[int, StageHoldings] = {}
        self._operators: dict[tuple[str, int], OperatorSeconds] = {}
        self._times: dict[tuple[str, int, int], StageTimes] = {}
        self._found: dict[tuple[str, int, int], list[_Costed]] = {}

    def offers(self, offers: Sequence[Offer], machines: Mapping[str, Machine], run: Reliability) -> list[Searched]:
        """Return each offer with its choices, in the offers' order. ``machines``: by the offers' ``gpu``."""
        shaped = [at_shape(machines[offer.gpu], offer.shape.ranks_per_node) for offer in offers]
        return [self._searched(offer, machine, run) for offer, machine in zip(offers, shaped, strict=True)]

    def stages(self, pp: int) -> StagePartition | None:
        """Return the best partition into so many stages, or the most even one; None where there are too few blocks."""
        if pp not in self._stages:
            model = self._training.model
            asked = (model.graph.flops, model.graph.cut_bytes, pp)
            try:
                self._stages[pp] = partition(*asked, EVEN, model.may_begin)
            except NoPartition as error:
                self._stages[pp] = partition(*asked, error.nearest_band, model.may_begin)
            except UsageError:
                self._stages[pp] = None
        return self._stages[pp]

    def _searched(self, offer: Offer, machine: Machine, run: Reliability) -> Searched:
        key = (offer.gpu, offer.shape.nodes, offer.shape.ranks_per_node)
        if key not in self._found:
            costed = [one for some in self._layouts(offer.shape.ranks) for one in self._costs(some, machine)]
            self._found[key] = sorted(costed, key=lambda one: one.time_s)
        every, room = self._found[key], machine.memory_gb * 1e9 * (1 - self._training.headroom)
        fits = [one for one in every if one.memory <= room]
        least = min((one.memory - room for one in every), default=0.0)
        choices = tuple(self._choice(offer, one, machine, run) for one in _thinned(fits, machine))
        best = tuple(self._choice(offer, one, machine, run) for one in fits[:BEST])
        return Searched(offer, choices, len(every), len(every) - len(fits), max(least, 0.0), best)

    def _layouts(self, gpus: int) -> Iterator[list[Layout]]:
        """Yield all layouts, those with as many stages together."""
        space, batch = self._training.space, self._training.global_batch
        kinds = [kind for kind in (Recompute.NONE, Recompute.FULL) if kind in space.recompute]
        if not self._training.model.in_blocks.any():
            kinds = kinds[:1]
        for pp in (d for d in divisors(gpus) if space.may("pp", d) and self.stages(d) is not None):
            dp = gpus // pp
            sharded = [zero for zero in space.zero if pp == 1 or zero in space.pipeline_zero] if dp > 1 else [0]
            sizes = [d for d in divisors(batch // dp) if space.may("micro_batch", d)] if batch % dp == 0 else []
            some = [
                Layout(1, pp, dp, micro, batch, recompute=kind, zero=zero)
                for micro in sizes for zero in sharded for kind in kinds
            ]  # fmt: skip
            if some:
                yield some

    def _costs(self, layouts: list[Layout], machine: Machine) -> Iterator[_Costed]:
        training, pp = self._training, layouts[0].pp
        stages = self.stages(pp)
        assert stages is not None
        known = training.measured.get(machine.gpu, training.efficiency)
        if pp not in self._held:
            self._held[pp] = holdings(training.model, stages.starts)
        for micro in dict.fromkeys(one.micro_batch for one in layouts):
            of_operators, of_stages = (machine.gpu, micro), (machine.gpu, micro, pp)
            if of_operators not in self._operators:
                seconds = operator_seconds(training.model, micro, machine, training.stack, known)
                self._operators[of_operators] = seconds
            if of_stages not in self._times:
                self._times[of_stages] = stage_sums(training.model, stages.starts, self._operators[of_operators])
        times = [self._times[machine.gpu, one.micro_batch, pp] for one in layouts]
        costs = traced_costs(
            TracedSetting(training.model, machine, training.stack, known), layouts, self._held[pp], times
        )
        columns = (costs.iteration, costs.bubble, costs.communication, costs.memory)
        for layout, *numbers in zip(layouts, *(column.tolist() for column in columns), strict=True):
            yield _Costed(layout, *numbers)

    def _choice(self, offer: Offer, one: _Costed, machine: Machine, run: Reliability) -> Choice:
        training, time = self._training, one.time_s
        width = math.exp(band()["traced"])
        each = training.global_batch / offer.shape.ranks
        flops = training.model.flops_per_sample * each
        return Choice(
            offer, one.layout, time, time / width, time * width, flops / time / peak_flops(machine, training.stack),
            one.bubble_s / time, one.moving_s / time, one.memory, machine.memory_gb * 1e9,
            overhead(run, offer.shape.nodes, time), run_s(run, offer.shape.nodes, time),
            each * max(training.model.tokens, 1) / time, flops / time, self._begins(one.layout.pp),
        )  # fmt: skip

    def _begins(self, pp: int) -> tuple[str, ...]:
        """Return the block, or the operator, with which each stage but the first begins."""
        stages, of = self.stages(pp), self._training.model.graph.operators
        first = [of[start] for start in (stages.starts[1:] if stages else ())]
        return tuple(one.block or one.module or one.name for one in first)


def _thinned(fits: Sequence[_Costed], machine: Machine) -> list[_Costed]:
    """Return the fastest, and each slower one that leaves clearly more memory free, as ``ranking`` does."""
    kept, step = list[_Costed](), STEP_OF_MEMORY * machine.memory_gb * 1e9
    for one in fits:
        if not kept or one.memory <= kept[-1].memory - step:
            kept.append(one)
    return kept
