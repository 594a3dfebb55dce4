"""The full cost model as what ``plan`` and the resizer ask."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resilio_hpc.autoparallel import Constraints, Inventory, Measurement, Pool, plan
from resilio_hpc.autoparallel.base.efficiency import shipped
from resilio_hpc.autoparallel.base.hardware import machine
from resilio_hpc.autoparallel.model.presets import preset
from resilio_hpc.autoparallel.search.model_speed import NEVER_S, ModelSpeed, SpeedModel
from resilio_hpc.autoparallel.search.ranking import Training, find
from resilio_hpc.autoparallel.search.uniform_model import uniform
from resilio_hpc.core.errors import UsageError

TRAINING = Training(uniform(preset("llama2-7b")), 256, shipped())
H100 = machine("H100")
NODES = tuple(f"n{number}" for number in range(8))


def speed(**changes: object) -> ModelSpeed:
    return replace(ModelSpeed(TRAINING, H100, 8), **changes)  # type: ignore[arg-type]


def test_each_number_of_nodes_has_the_time_of_its_best_layout() -> None:
    best = find(TRAINING, H100, 16)
    assert speed().step_s(2) == best.cost.iteration[0] and speed().layout(2) == best.layouts.row(0)
    assert speed().speed(4) > speed().speed(2) and 0 < speed(nodes=2).communication_s < speed().step_s(2)


def test_plan_ranks_candidates_with_their_layouts_and_leaves_out_those_without() -> None:
    inventory = Inventory((Pool("main", "h100", 8, NODES, NODES[:4]),))
    found = plan(inventory, speed(), Constraints("main", 8, max_nodes=8))
    assert found[0].nodes == 8 and {one.nodes for one in found if one.startable} == {1, 2, 3, 4}
    assert [one.speed for one in found] == sorted((one.speed for one in found), reverse=True)
    assert all(one.layout is not None and one.layout.num_gpus == 8 * one.nodes for one in found)
    assert all(one.data_parallel == one.layout.dp and one.accumulation == one.layout.micro_batches for one in found
               if one.layout)  # fmt: skip
    assert speed().layout(67) is None and speed().step_s(67) == NEVER_S
    assert plan(inventory, speed(), Constraints("main", 8, min_nodes=67, max_nodes=67)) == []


def test_measured_times_scale_what_is_predicted() -> None:
    predicted = {nodes: speed().step_s(nodes) for nodes in (1, 2, 4, 8)}
    seen = speed(measured=(Measurement(2, predicted[2] * 1.3), Measurement(8, predicted[8] * 2.0)))
    assert seen.step_s(2) == pytest.approx(predicted[2] * 1.3) and seen.step_s(8) == pytest.approx(predicted[8] * 2)
    assert seen.step_s(1) == pytest.approx(predicted[1] * 1.3)  # by the nearest size


def test_the_degrees_of_the_run_are_kept() -> None:
    kept = speed(degrees=lambda ranks: (4, 2))
    found = kept.layout(2)
    assert found is not None and (found.tp, found.pp, found.dp) == (4, 2, 2)
    assert kept.step_s(2) > speed().step_s(2)


def test_a_model_that_could_not_run_as_the_run_does_is_a_mistake() -> None:
    model = SpeedModel(lambda gpu, each: (replace(TRAINING, model=uniform(preset("gpt3-175b"))), H100))
    with pytest.raises(UsageError, match="no layout of it runs on the 1 x 8 H100"):
        model.speed([Measurement(1, 3.0)], 1, 8, ("h100", 8), lambda ranks: None)
