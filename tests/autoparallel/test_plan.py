"""Shapes, the throughput curve, and the order of candidates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc.autoparallel import Constraints, Inventory, Measurement, Pool, Throughput, fit, plan
from resilio_hpc.core.errors import UsageError

LINEAR = Throughput(compute_s=8.0, communication_s=0.0, assumed=False)


def pool(idle: int, partition: str = "main", gpu_type: str = "h100") -> Pool:
    names = tuple(f"{gpu_type}{number}" for number in range(idle))
    return Pool(partition, gpu_type, 8, names, names)


def constraints(**changes: object) -> Constraints:
    values: dict[str, object] = {
        "partition": "main",
        "ranks_per_node": 8,
        "max_nodes": 8,
        "held": frozenset({"a", "b"}),
    }
    return Constraints(**{**values, **changes})  # type: ignore[arg-type]


def test_candidates_are_ranked_by_speed_and_say_which_could_start() -> None:
    found = plan(Inventory((pool(3),)), LINEAR, constraints(max_nodes=6))
    assert [one.nodes for one in found] == [6, 5, 4, 3, 2, 1]
    assert [one.startable for one in found] == [False, True, True, True, True, True]
    assert [one.more_nodes for one in found] == [4, 3, 2, 1, 0, 0]


def test_of_equally_fast_candidates_the_smaller_comes_first() -> None:
    flat = Throughput(compute_s=0.0, communication_s=1.0, assumed=False)
    assert [one.nodes for one in plan(Inventory((pool(9),)), flat, constraints(min_nodes=2, max_nodes=4))] == [2, 3, 4]


def test_idle_nodes_of_another_partition_or_kind_do_not_count() -> None:
    inventory = Inventory((pool(1), pool(5, gpu_type="a100"), pool(5, "low", "b200")))
    startable = [one.nodes for one in plan(inventory, LINEAR, constraints(gpu_type="h100")) if one.startable]
    assert max(startable) == 3
    any_kind = [one.nodes for one in plan(inventory, LINEAR, constraints()) if one.startable]
    assert max(any_kind) == 8


def test_nodes_that_the_run_holds_are_not_taken_twice() -> None:
    held = constraints(held=frozenset({"h1000", "h1001"}), max_nodes=4)
    assert max(one.nodes for one in plan(Inventory((pool(3),)), LINEAR, held) if one.startable) == 3


def test_shapes_keep_to_the_unit_the_model_and_the_batch() -> None:
    nodes = [one.nodes for one in plan(Inventory(()), LINEAR, constraints(node_unit=2, min_nodes=3))]
    assert sorted(nodes) == [4, 6, 8]
    split = plan(Inventory(()), LINEAR, constraints(model_parallel=16, global_batch=96, micro_batch=8))
    assert {one.nodes: (one.data_parallel, one.accumulation) for one in split} == {
        2: (1, 12), 4: (2, 6), 6: (3, 4), 8: (4, 3),
    }  # fmt: skip
    assert plan(Inventory(()), LINEAR, constraints(global_batch=7)) == []


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
