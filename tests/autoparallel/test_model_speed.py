"""The full cost model as what the resizer asks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resilio_hpc.autoparallel import Constraints, Measurement, sizes
from resilio_hpc.autoparallel.base.efficiency import shipped
from resilio_hpc.autoparallel.base.hardware import machine
from resilio_hpc.autoparallel.model.model_description import uniform
from resilio_hpc.autoparallel.model.presets import preset
from resilio_hpc.autoparallel.search.model_speed import NEVER_S, ModelSpeed, SpeedModel
from resilio_hpc.autoparallel.search.ranking import Training, find
from resilio_hpc.core.errors import UsageError

TRAINING = Training(uniform(preset("llama2-7b")), 256, shipped())
H100 = machine("H100")


def speed(**changes: object) -> ModelSpeed:
    return replace(ModelSpeed(TRAINING, H100, 8), **changes)  # type: ignore[arg-type]


def test_each_number_of_nodes_has_the_time_of_its_best_layout() -> None:
    best = find(TRAINING, H100, 16)
    assert speed().step_s(2) == best.cost.iteration[0] and speed().planned(2).layout == best.layouts.row(0)
    assert speed().speed(4) > speed().speed(2) and 0 < speed(nodes=2).communication_s < speed().step_s(2)


def test_sizes_are_ranked_and_those_without_a_layout_left_out() -> None:
    found = sizes(speed(), Constraints(8, max_nodes=8))
    assert found[0] == 8 and {1, 2, 4} <= set(found)
    assert [speed().speed(nodes) for nodes in found] == sorted(map(speed().speed, found), reverse=True)
    assert not speed().possible(67) and speed().step_s(67) == NEVER_S
    assert sizes(speed(), Constraints(8, min_nodes=67, max_nodes=67)) == []


def test_measured_times_scale_what_is_predicted() -> None:
    predicted = {nodes: speed().step_s(nodes) for nodes in (1, 2, 4, 8)}
    seen = speed(measured=(Measurement(2, predicted[2] * 1.3), Measurement(8, predicted[8] * 2.0)))
    assert seen.step_s(2) == pytest.approx(predicted[2] * 1.3) and seen.step_s(8) == pytest.approx(predicted[8] * 2)
    assert seen.step_s(1) == pytest.approx(predicted[1] * 1.3)  # by the nearest size


def test_the_degrees_of_the_run_are_kept() -> None:
    kept = speed(degrees=lambda ranks: (4, 2))
    found = kept.planned(2).layout
    assert found is not None and (found.tp, found.pp, found.dp) == (4, 2, 2)
    assert kept.step_s(2) > speed().step_s(2)


def test_a_model_that_could_not_run_as_the_run_does_is_a_mistake() -> None:
    model = SpeedModel(lambda gpu, each: (replace(TRAINING, model=uniform(preset("gpt3-175b"))), H100))
    with pytest.raises(UsageError, match="no layout of it runs on the 1 x 8 H100"):
        model.speed([Measurement(1, 3.0)], 1, 8, ("h100", 8), lambda ranks: None)
