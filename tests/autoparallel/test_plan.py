"""Shapes, the throughput curve, and the order of sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc.autoparallel import Constraints, Measurement, Throughput, fit, sizes
from resilio_hpc.core.errors import UsageError

LINEAR = Throughput(compute_s=8.0, communication_s=0.0, assumed=False)


def constraints(**changes: int) -> Constraints:
    return Constraints(**{"ranks_per_node": 8, "max_nodes": 8, **changes})


def test_sizes_are_ranked_by_speed() -> None:
    assert sizes(LINEAR, constraints(max_nodes=6)) == [6, 5, 4, 3, 2, 1]


def test_of_equally_fast_sizes_the_smaller_comes_first() -> None:
    flat = Throughput(compute_s=0.0, communication_s=1.0, assumed=False)
    assert sizes(flat, constraints(min_nodes=2, max_nodes=4)) == [2, 3, 4]


def test_shapes_keep_to_the_unit_the_model_and_the_batch() -> None:
    assert sizes(LINEAR, constraints(node_unit=2, min_nodes=3)) == [8, 6, 4]
    assert sizes(LINEAR, constraints(model_parallel=16, global_batch=96, micro_batch=8)) == [8, 6, 4, 2]
    assert sizes(LINEAR, constraints(model_parallel=16, global_batch=96, micro_batch=16)) == [6, 4, 2]
    assert sizes(LINEAR, constraints(global_batch=7)) == []


# -- the throughput curve --------------------------------------------------------------------------------------------


def test_two_sizes_give_the_communication() -> None:
    curve = fit([Measurement(2, 5.5), Measurement(4, 3.0)], share=0.9)
    assert (curve.compute_s, curve.communication_s, curve.assumed) == (pytest.approx(10.0), pytest.approx(0.5), False)
    assert curve.step_s(10) == pytest.approx(1.5)


def test_one_size_needs_an_assumption() -> None:
    curve = fit([Measurement(4, 2.0), Measurement(4, 9.0), Measurement(4, 2.0)], share=0.25)
    assert curve.assumed and curve.step_s(4) == pytest.approx(2.0)
    assert curve.step_s(8) == pytest.approx(0.75 + 0.5)


def test_communication_comes_on_top_where_one_node_alone_was_measured() -> None:
    curve = fit([Measurement(1, 4.0)], share=0.1)
    assert (curve.step_s(1), curve.step_s(2)) == (4.0, pytest.approx(2.4))


def test_a_scaled_batch_takes_the_same_step_and_holds_more_samples() -> None:
    curve = fit([Measurement(4, 2.0)], share=0.1, rule="scale", reference=4)
    assert curve.step_s(8) == pytest.approx(curve.step_s(4)) == pytest.approx(2.0)
    assert curve.speed(8) == pytest.approx(2 * curve.speed(4))


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(UsageError, match="no step time"):
        fit([Measurement(0, 1.0), Measurement(2, 0.0)], share=0.1)


@given(st.lists(st.builds(Measurement, st.integers(1, 500), st.floats(1e-3, 1e3)), min_size=1), st.floats(0, 0.9))
def test_no_measurements_make_more_nodes_slower_or_a_time_negative(measured: list[Measurement], share: float) -> None:
    curve = fit(measured, share)
    assert curve.compute_s >= 0 and curve.communication_s >= 0
    assert curve.step_s(2) > 0 and curve.speed(4) >= curve.speed(2) * (1 - 1e-9)
