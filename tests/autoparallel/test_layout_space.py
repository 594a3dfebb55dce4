"""Experts split over tensor-parallel ranks, and stages with fewer layers where the loss head is."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from resilio_hpc.autoparallel.base.efficiency import shipped
from resilio_hpc.autoparallel.base.hardware import Machines, machine
from resilio_hpc.autoparallel.base.layout import Layout, Layouts
from resilio_hpc.autoparallel.base.stack import Stack, Stacks
from resilio_hpc.autoparallel.cost.cost import Cost, Problem, iteration, stage_layers
from resilio_hpc.autoparallel.cost.memory import memory
from resilio_hpc.autoparallel.cost.stage_times import layers_of
from resilio_hpc.autoparallel.model.model_description import uniform
from resilio_hpc.autoparallel.model.presets import preset
from resilio_hpc.autoparallel.model.transformer import Transformer, Transformers
from resilio_hpc.autoparallel.search.frameworks import machine_and_stack, space_of
from resilio_hpc.autoparallel.search.layout_space import Space, enumerate_layouts, head_layers
from resilio_hpc.autoparallel.search.search import search
from resilio_hpc.cli.plan.emit import pipeline_layout

MOE = Transformer(16, 2048, 16, 8192, 51200, 2048, experts=8, topk=2, expert_ffn=4096, gated=True, name="moe")
LLAMA = uniform(preset("llama3-8b"))
H100 = machine("H100")


def asked(layout: Layout, model: Transformer = MOE) -> Problem:
    return Problem(Transformers.of([model]), Layouts.of([layout]), Machines.of([H100]), Stacks.of([Stack()]))


def cost(layout: Layout, model: Transformer = MOE) -> Cost:
    return iteration(asked(layout, model), shipped()).full(1)


# -- experts -----------------------------------------------------------------------------------------------------------


def test_experts_are_split_over_any_divisor_of_the_tensor_parallel_ranks_where_the_framework_can() -> None:
    found = enumerate_layouts(MOE, H100, 16, 16, Space(expert_tp=True))
    assert set(found.etp[found.tp == 8]) == {1.0, 2.0, 4.0, 8.0}
    assert np.all(np.mod(found.tp, found.etp) == 0) and np.all(found.sequence_parallel[found.tp > 1] == 1)
    assert np.all(np.mod(found.tp * found.dp * found.cp, found.ep * found.etp) == 0)
    assert set(enumerate_layouts(MOE, H100, 16, 16, Space()).etp) == {0.0}  # as the framework does it
    assert set(enumerate_layouts(MOE, H100, 16, 16, Space(expert_tp=True, only={"etp": 2})).etp) == {2.0}


def test_a_split_expert_takes_less_memory_and_more_traffic_inside_of_a_node() -> None:
    whole = Layout(tp=4, dp=2, ep=2, etp=1, global_batch=64, sequence_parallel=True, zero=1)
    split = replace(whole, etp=4)
    one, four = (memory(asked(layout)) for layout in (whole, split))
    experts = 16 * 8 * 3 * 2048 * 4096 / 2
    ranks = 4 * 2 / 2  # with the same experts; a split one leaves a rank of them
    assert one.states[0] - four.states[0] == pytest.approx(experts * (6 + 12 / ranks) - experts / 4 * (6 + 12))
    assert cost(split).expert_parallel[0] > cost(whole).expert_parallel[0]


def test_ranks_that_share_an_expert_do_its_work_once() -> None:
    whole = Layout(tp=4, dp=2, ep=2, etp=1, micro_batch=16, global_batch=64, sequence_parallel=True)
    one, four = (float(cost(layout).compute[0]) for layout in (whole, replace(whole, etp=4)))
    assert four == pytest.approx(one, rel=0.1)  # the same products, of other shapes


# -- stages ------------------------------------------------------------------------------------------------------------


def largest(model: Transformer, held: list[int]) -> float:
    """FLOPs of the largest stage per token, the loss head on the last one."""
    models = Transformers.of([model])
    head = 6 * float(models.embedding_parameters[0])
    layer = (float(models.flops_per_token[0]) - head) / model.layers
    return max(count * layer + head * (stage == len(held) - 1) for stage, count in enumerate(held))


@pytest.mark.parametrize("layers", [7, 8, 10, 12])
@pytest.mark.parametrize("stages", [2, 3, 4, 5])
@pytest.mark.parametrize("vocab", [32000, 128256, 512000])
def test_no_partition_into_whole_layers_has_a_smaller_largest_stage(layers: int, stages: int, vocab: int) -> None:
    model = replace(LLAMA, layers=layers, vocab=vocab)
    cuts = combinations(range(layers + 1), stages - 1)
    every = (np.diff([0, *points, layers]).tolist() for points in cuts)
    best = min(largest(model, held) for held in every)
    held = layers_of(layers, stages, head_layers(model, stages))
    assert sum(held) == layers and min(held) >= 0
    assert largest(model, held) == pytest.approx(best)


@pytest.mark.parametrize("name", ["llama3-8b", "gemma2-9b", "qwen3-8b", "llama3-405b"])
def test_the_search_costs_the_stages_that_it_emits(name: str) -> None:
    model = uniform(preset(name), 4096)
    machine, stack = machine_and_stack("h100", 0, "Megatron-Core", "bf16")
    space = replace(space_of("Megatron-Core"), only={"tp": 8, "pp": 8 if model.layers < 100 else 16})
    found = search(model, machine, 64 if model.layers < 100 else 512, 256, stack, space)
    for row in range(0, found.cost.iteration.size, 7):
        layout = found.layouts.row(row)
        one = Problem(Transformers.of([model]), Layouts.of([layout]), Machines.of([machine]), Stacks.of([stack]))
        chunks = [chunk.count("t") for chunk in pipeline_layout(layout, model.layers).split("|")]
        stages = [sum(chunks[stage :: layout.pp]) for stage in range(layout.pp)]
        held = stage_layers(one)
        assert (stages[0], max(stages), stages[-1]) == (held.first[0], held.most[0], held.last[0])
        assert float(iteration(one, shipped()).iteration[0]) == pytest.approx(float(found.cost.iteration[row]))


def test_a_large_vocabulary_takes_layers_from_the_last_stage_and_time_from_the_iteration() -> None:
    even = Layout(tp=2, pp=8, dp=2, global_batch=64, sequence_parallel=True, zero=1)
    uneven = replace(even, head_layers=head_layers(LLAMA, 8))
    assert uneven.head_layers > 0
    assert cost(uneven, LLAMA).iteration[0] < 0.9 * cost(even, LLAMA).iteration[0]
    assert f"head{uneven.head_layers}" in str(uneven)
