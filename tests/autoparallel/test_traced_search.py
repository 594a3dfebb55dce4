"""Layouts of any torch module by its operators: beside the description of the same model, and beside each by itself."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from resilio_hpc.autoparallel.base.efficiency import shipped
from resilio_hpc.autoparallel.base.hardware import Machines
from resilio_hpc.autoparallel.base.layout import Layout, Layouts, Recompute
from resilio_hpc.autoparallel.base.shapes import Shape
from resilio_hpc.autoparallel.base.stack import Stacks
from resilio_hpc.autoparallel.cost.cost import Problem, iteration
from resilio_hpc.autoparallel.cost.memory import memory
from resilio_hpc.autoparallel.cost.operator_times import operator_seconds
from resilio_hpc.autoparallel.cost.traced_cost import TracedCosts, TracedSetting, holdings, stage_sums, traced_costs
from resilio_hpc.autoparallel.model.model_description import uniform
from resilio_hpc.autoparallel.model.traced_model import TracedModel
from resilio_hpc.autoparallel.model.transformer import Transformer, Transformers
from resilio_hpc.autoparallel.search.choice import Offer
from resilio_hpc.autoparallel.search.failures import Reliability
from resilio_hpc.autoparallel.search.frameworks import machine_and_stack, space_of
from resilio_hpc.autoparallel.search.ranking import Searched
from resilio_hpc.autoparallel.search.traced_search import TracedSearch, TracedTraining

torch = pytest.importorskip("torch")

from resilio_hpc.autoparallel.model.module_description import described_module  # noqa: E402
from resilio_hpc.autoparallel.model.saved_tensors import traced_model  # noqa: E402
from tests.autoparallel.test_module_description import Decoder  # noqa: E402
from tests.support.torch_modules import skipping, widening  # noqa: E402


def make_decoder() -> Any:
    block = {"hidden": 4096, "heads": 64, "groups": 64, "ffn": 11008, "fused": True, "gated": True}
    return Decoder(False, **block).to(torch.bfloat16), (torch.zeros(1, 2048, dtype=torch.long),)


@cache
def decoder() -> TracedModel:
    return traced_model(make_decoder, "here")


@cache
def description() -> Transformer:
    return uniform(described_module(make_decoder, "here"))


def costs(model: TracedModel, layout: Layout, starts: tuple[int, ...], gpu: str, software: str) -> TracedCosts:
    machine, stack = machine_and_stack(gpu, 8, software)
    times = operator_seconds(model, layout.micro_batch, machine, stack, shipped())
    setting = TracedSetting(model, machine, stack, shipped())
    return traced_costs(setting, [layout], holdings(model, starts), [stage_sums(model, starts, times)])


def training(model: TracedModel, batch: int = 64, **more: Any) -> TracedTraining:
    _, stack = machine_and_stack("h100", 8, "PyTorch")
    return TracedTraining(model, batch, shipped(), stack, space_of("PyTorch"), **more)


LAYOUTS = [
    Layout(dp=16, micro_batch=4, global_batch=256, zero=3),
    Layout(dp=16, micro_batch=2, global_batch=256, zero=3, recompute=Recompute.FULL),
    Layout(dp=16, micro_batch=2, global_batch=256, zero=1),
    Layout(pp=4, dp=4, micro_batch=1, global_batch=256, zero=1),
    Layout(pp=2, dp=8, micro_batch=2, global_batch=256, recompute=Recompute.FULL),
]


@pytest.mark.parametrize("gpu", ["a100", "h100"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_decoder_costs_by_its_operators_what_it_costs_by_its_description(layout: Layout, gpu: str) -> None:
    stages = TracedSearch(training(decoder())).stages(layout.pp)
    assert stages is not None
    found = costs(decoder(), layout, stages.starts, gpu, "torchtitan")
    machine, stack = machine_and_stack(gpu, 8, "torchtitan")
    asked = Problem(Transformers.of([description()]), Layouts.of([layout]), Machines.of([machine]), Stacks.of([stack]))
    assert decoder().flops_per_sample == pytest.approx(float(asked.models.flops_per_token[0]) * 2048, rel=0.01)
    assert found.iteration[0] == pytest.approx(iteration(asked, shipped()).iteration[0], rel=0.15)
    assert found.memory[0] == pytest.approx(memory(asked).device[0], rel=0.25)


def test_layouts_together_cost_what_each_costs_alone() -> None:
    model = traced_model(widening, "here")
    searching = TracedSearch(training(model))
    offer = Offer(Shape(2, 8), "", "h100")
    machines = {"h100": machine_and_stack("h100", 8, "PyTorch")[0]}
    (found,) = searching.offers([offer], machines, Reliability())
    assert found.looked_at > 40
    for choice in {*found.choices, *found.best}:
        stages = searching.stages(choice.layout.pp)
        assert stages is not None
        alone = costs(model, choice.layout, stages.starts, "h100", "PyTorch")
        assert choice.iteration_s == pytest.approx(float(alone.iteration[0]), rel=1e-12)
        assert choice.memory_bytes == pytest.approx(float(alone.memory[0]), rel=1e-12)
    assert found.best[0].iteration_s == min(one.iteration_s for one in found.best)


def test_every_stage_begins_with_a_part_and_no_cut_is_more_even() -> None:
    model = traced_model(widening, "here")
    searching = TracedSearch(training(model))
    stages = searching.stages(4)
    assert stages is not None and len(stages.starts) == 4
    assert all(model.graph.operators[start].block.startswith("layers.") for start in stages.starts[1:])
    before = np.append(0, np.cumsum(model.graph.flops))
    mean = model.graph.total_flops / 4
    points = np.flatnonzero(model.may_begin)[1:].tolist()
    cut = [np.diff([0, *(before[p] for p in some), before[-1]]) for some in combinations(points, 3)]
    assert abs(np.array(stages.flops) / mean - 1).max() <= min(abs(one / mean - 1).max() for one in cut) + 0.001
    assert searching.stages(10) is not None and searching.stages(11) is None


def test_a_skip_connection_is_received_by_every_stage_that_it_crosses() -> None:
    model = traced_model(skipping, "here")
    middle = next(i for i, op in enumerate(model.graph.operators) if op.module == "up.0")
    late = next(i for i, op in enumerate(model.graph.operators) if op.module == "up.2")
    held = holdings(model, (0, middle, late))
    one = 4 * 16 * 16 * 4  # a channel of the micro-batch in fp32
    # what is joined for it, and what its successors will join
    assert held.received.tolist() == [0, one * (256 + 64 + 128), one * 128]
    assert held.counts.sum() == model.graph.parameter_count


def test_what_more_of_something_does() -> None:
    model = traced_model(widening, "here")
    searching = TracedSearch(training(model))
    starts = {pp: stages.starts for pp in (1, 2, 4) if (stages := searching.stages(pp)) is not None}

    def memory_of(**more: Any) -> float:
        layout = replace(Layout(dp=8, micro_batch=1, global_batch=64), **more)
        return float(costs(model, layout, starts[layout.pp], "h100", "PyTorch").memory[0])

    by_zero = [memory_of(zero=zero) for zero in range(4)]
    assert by_zero[0] > by_zero[1] > by_zero[2]
    assert by_zero[3] == min(by_zero)
    assert memory_of(recompute=Recompute.FULL, micro_batch=8) < memory_of(micro_batch=8)
    assert memory_of(micro_batch=1) < memory_of(micro_batch=2) < memory_of(micro_batch=4)


def test_a_model_of_twice_the_samples_is_the_same_model() -> None:
    one, two = traced_model(lambda: widening(samples=1), "here"), traced_model(lambda: widening(samples=2), "here")
    for layout in LAYOUTS[:3]:
        single, double = (costs(model, layout, (0,), "h100", "PyTorch") for model in (one, two))
        assert double.iteration[0] == pytest.approx(single.iteration[0], rel=1e-6)
        assert double.memory[0] == pytest.approx(single.memory[0], rel=1e-6)


def test_what_does_not_fit_is_no_choice_and_says_how_much_is_missing() -> None:
    searching = TracedSearch(
        training(traced_model(lambda: widening(layers=12, hidden=8192), "here"), 512, headroom=0.1)
    )
    offers = [Offer(Shape(nodes, 8), "", "v100") for nodes in (1, 64)]

    def found(memory_gb: float) -> list[Searched]:
        machine = replace(machine_and_stack("v100", 8, "PyTorch")[0], memory_gb=memory_gb)
        return searching.offers(offers, {"v100": machine}, Reliability())

    small, large = found(3.4)
    assert (small.choices, small.too_large) == ((), small.looked_at) and 0 < small.least_excess < math.inf
    assert large.choices and all(one.memory_bytes <= 0.9 * 3.4e9 for one in large.choices)
    just = 3.4 + small.least_excess / 0.9e9
    assert found(just + 1e-6)[0].choices and not found(just - 1e-6)[0].choices


def test_slower_choices_leave_more_memory_free() -> None:
    model = traced_model(widening, "here")
    machines = {"h100": replace(machine_and_stack("h100", 8, "PyTorch")[0], memory_gb=6.0)}
    (found,) = TracedSearch(training(model, 4096)).offers([Offer(Shape(1, 8), "", "h100")], machines, Reliability())
    times = [one.iteration_s for one in found.choices]
    held = [one.memory_bytes for one in found.choices]
    assert len(times) > 1 and times == sorted(times) and held == sorted(held, reverse=True)
    assert np.all(-np.diff(held) >= 0.05 * 6e9 * 0.99)
