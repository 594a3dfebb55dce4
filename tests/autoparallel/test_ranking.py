"""Every offered shape with its best layout, ranked; why others lost; what stands in the way of all."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from resilio_hpc.autoparallel import Inventory
from resilio_hpc.autoparallel.base.efficiency import shipped
from resilio_hpc.autoparallel.base.hardware import Machines, machine
from resilio_hpc.autoparallel.base.layout import Layout, Layouts, Recompute
from resilio_hpc.autoparallel.base.shapes import Shape
from resilio_hpc.autoparallel.base.stack import Stack, Stacks
from resilio_hpc.autoparallel.cost.cost import Problem, iteration
from resilio_hpc.autoparallel.cost.memory import memory
from resilio_hpc.autoparallel.model.model_description import uniform
from resilio_hpc.autoparallel.model.presets import preset
from resilio_hpc.autoparallel.model.transformer import Transformers
from resilio_hpc.autoparallel.search import infeasible, paper
from resilio_hpc.autoparallel.search.choice import Choice, Offer
from resilio_hpc.autoparallel.search.failures import Reliability, interval_s, overhead, run_s
from resilio_hpc.autoparallel.search.inventory_file import assumed
from resilio_hpc.autoparallel.search.layout_space import Space
from resilio_hpc.autoparallel.search.offers import OfferRequest, offers
from resilio_hpc.autoparallel.search.ranking import Searched, Training, at_shape, find, pareto, ranked, search_offers
from resilio_hpc.autoparallel.search.rejected_candidates import rejected_candidates

H100 = machine("H100")
TRAINING = Training(uniform(preset("llama2-7b")), 256, shipped())
NO_FAILURES = Reliability()


def searched(gpus: int, run: Reliability = NO_FAILURES, training: Training = TRAINING) -> list[Searched]:
    return search_offers(offers(assumed(gpus, 8, "h100"), OfferRequest(), 0.0), training, {"h100": H100}, run)


def choice(time: float, gpus: int = 8, memory_bytes: float = 60e9, wait: float | None = 0.0) -> Choice:
    offer = Offer(Shape(gpus // 8, 8), "main", "h100", "now" if wait == 0 else "ever", wait)
    return Choice(offer, Layout(dp=gpus), time, time, time, 0.4, 0.0, 0.0, memory_bytes, 80e9, 0.0, 1000 * time)


def of(*choices: Choice) -> list[Searched]:
    return [Searched(one.offer, (one,), 1, 0, 0.0) for one in choices]


def test_a_shape_has_the_fastest_of_all_its_layouts() -> None:
    for one in searched(32):
        found = find(TRAINING, H100, one.offer.shape.ranks)
        if one.choices:
            assert one.choices[0].iteration_s == found.cost.iteration.min()
            assert one.choices[0].low_s < one.choices[0].iteration_s < one.choices[0].high_s
            assert 0 < one.choices[0].mfu < 1 and one.choices[0].memory_bytes <= 85e9
        else:
            assert found.cost.iteration.size == 0


def test_its_other_choices_are_slower_and_leave_more_memory_free() -> None:
    for one in searched(32):
        times, free = [c.iteration_s for c in one.choices], [c.headroom_bytes for c in one.choices]
        assert times == sorted(times) and all(b - a > 0.04 * 85e9 for a, b in pairwise(free))


def test_part_of_a_node_has_part_of_its_network() -> None:
    part = at_shape(H100, 2)
    assert (part.node_gpus, part.domain_gpus, part.nic_gbytes_s) == (2, 2, 100.0)
    rack = at_shape(machine("GB200"), 2)
    assert rack.domain_gpus == machine("GB200").domain_gpus


def test_ranks() -> None:
    slow, fast, late = choice(3.0, 8), choice(1.0, 64), choice(0.9, 64, wait=None)
    assert ranked(of(slow, fast, late), "time") == [late, fast, slow]
    assert ranked(of(slow, fast, late), "gpu-hours")[0] is slow
    assert ranked(of(slow, fast, late), "finish") == [fast, slow, late]
    assert ranked(of(slow, choice(1.0, 64, wait=5000.0)), "finish")[0] is slow


def test_the_pareto_front_is_what_no_other_beats() -> None:
    choices = [choice(1.0, 64), choice(1.1, 64), choice(1.1, 64, 30e9), choice(2.0, 32), choice(2.0, 64, 29e9)]
    assert pareto(of(*choices)) == [choices[0], choices[2], choices[3], choices[4]]
    front = pareto(searched(32))
    points = [(one.iteration_s, one.gpus, -one.headroom_bytes, one.overhead) for one in front]
    beaten = [a for a in points for b in points if a != b and all(x >= y for x, y in zip(a, b, strict=True))]
    assert beaten == []


def test_failures_cost_more_on_more_nodes_and_may_never_let_a_run_end() -> None:
    run = Reliability(node_mtbf_s=1e6, restart_s=300, checkpoint_s=10, steps=100)
    assert 0 < overhead(run, 1, 1.0) < overhead(run, 100, 1.0) < 1
    assert overhead(replace(run, node_mtbf_s=math.inf), 100, 1.0) == 0 and run_s(NO_FAILURES, 9, 2.0) == 2000
    assert math.isinf(run_s(replace(run, node_mtbf_s=100), 100, 1.0))


def test_the_checkpoint_interval_is_the_best_one() -> None:
    run = Reliability(node_mtbf_s=86400, restart_s=300, checkpoint_s=10)
    best = interval_s(86400, 10, 1.0)
    lost = [1 - t / (86400 * math.exp(300 / 86400) * math.expm1((t + 10) / 86400)) for t in (best / 2, best, best * 2)]
    assert lost[1] == min(lost) and overhead(run, 1, 1.0) == pytest.approx(lost[1])
    # first order: (C / τ) + τ / 2M + R / M
    assert overhead(run, 1, 1.0) == pytest.approx(10 / best + best / 2 / 86400 + 300 / 86400, rel=0.05)


# -- why others lost ---------------------------------------------------------------------------------------------------


def test_each_class_of_losers_has_its_best_and_those_that_do_not_fit_what_they_lack() -> None:
    best = find(TRAINING, H100, 16)
    lost = rejected_candidates(TRAINING, H100, 16)
    assert lost[0].excess_bytes > 0 and "do not fit" in lost[0].line() and lost[0].count == best.too_large
    for one in lost[1:]:
        assert one.slower >= 0 and one.excess_bytes == 0 and one.layout != best.layouts.row(0)
        assert "slower" in one.line() and one.others
    by_depth = next(one for one in lost if "pipeline depth" in one.others)
    other = best.layouts.pp != best.layouts.pp[0]
    assert by_depth.slower == pytest.approx(float(best.cost.iteration[other][0] / best.cost.iteration[0] - 1))


# -- what stands in the way --------------------------------------------------------------------------------------------


def test_what_does_not_fit_names_what_it_lacks_and_the_least_gpus_that_would_do() -> None:
    training = Training(uniform(preset("gpt3-175b")), 1536, shipped(), space=Space(zero=(0, 1)))
    said = infeasible.why_none(training, H100, 16)
    least = int(said.rpartition("GPUs that fits is ")[2].split(";")[0])
    assert "GB more per GPU than the 85 GB of H100" in said and find(training, H100, least).cost.iteration.size
    assert all(not find(training, H100, gpus).cost.iteration.size for gpus in range(16, least, 8))


def test_a_wider_space_on_the_same_gpus_is_named() -> None:
    training = replace(TRAINING, space=Space(zero=(0,), only={"tp": 1, "pp": 1}))
    assert "zero" in infeasible.why_none(training, H100, 8).partition("would fit (--framework any)")[0]


@pytest.mark.parametrize(
    ("changes", "gpus", "answer"),
    [
        ({"global_batch": 7, "space": Space(only={"tp": 2, "pp": 1})}, 12, "the nearest batches are 6 and 12"),
        ({"space": Space(only={"tp": 8, "pp": 1})}, 12, "the nearest numbers are 8 and 16"),
        ({"space": Space(only={"tp": 3})}, 12, "tp 3 does not divide 32 attention heads"),
        ({"space": Space(only={"pp": 64})}, 64, "pp 64 is more than the 32 layers"),
        ({"space": Space(only={"tp": 16})}, 64, "8 GPUs that share NVLink"),
        ({"space": Space(only={"micro_batch": 3, "pp": 1, "tp": 1})}, 8, "of 3: the nearest batches are 240 and 264"),
        ({}, 67, "over the 67 replicas that 67 GPUs can hold: the nearest batches are 201 and 268, the nearest number"),
    ],
)  # fmt: skip
def test_degrees_that_cannot_be_had_are_named(changes: dict[str, object], gpus: int, answer: str) -> None:
    training = replace(TRAINING, **changes)  # type: ignore[arg-type]
    assert find(training, H100, gpus).looked_at == 0
    assert answer in infeasible.why_none(training, H100, gpus)


# -- the paper's planner -----------------------------------------------------------------------------------------------


def test_the_papers_planner_gives_each_shape_one_layout_with_as_many_stages_as_nodes() -> None:
    offered = offers(nodes(16), OfferRequest(16, 16), 0.0)
    found = paper.search_offers(offered, TRAINING, {"h100": H100}, NO_FAILURES)
    assert [one.offer for one in found] == offered
    for one in found:
        for row in one.choices:
            assert (
                row.layout.pp == one.offer.shape.nodes
                and row.layout.tp * row.layout.dp == row.offer.shape.ranks_per_node
            )
    assert any(one.choices for one in found)


def nodes(count: int) -> Inventory:
    return assumed(count * 8, 8, "h100")


def test_formula_3_is_the_default_models_pipeline_less_what_it_leaves_out() -> None:
    offer = Offer(Shape(2, 8), "", "h100")
    training = replace(TRAINING, space=Space(zero=(1,), recompute=(Recompute.FULL,)))
    (one,) = paper.search_offers([offer], training, {"h100": H100}, NO_FAILURES)
    layout = one.choices[0].layout
    models, layouts = Transformers.of([TRAINING.model]), Layouts.of([layout])
    asked = Problem(models, layouts, Machines.of([H100]), Stacks.of([Stack()]))
    assert memory(asked).device[0] == one.choices[0].memory_bytes
    full = float(iteration(asked, shipped()).iteration[0])
    assert 0.6 * full < one.choices[0].iteration_s < full and np.isfinite(full)
