"""The paper's algorithm 1 and formula (3), against figures worked by hand from the paper."""

import pytest

from resilio_hpc.autoparallel.base.shapes import Shape
from resilio_hpc.autoparallel.search.paper import Degrees, algorithm_1, formula_3, shapes


def test_shapes_have_most_gpus_per_node_first() -> None:
    assert shapes(8) == [Shape(1, 8), Shape(2, 4), Shape(4, 2), Shape(8, 1)]


def test_formula_3_counts_micro_batches() -> None:
    # Σp = 10, Σc = 0.5, (8 - 1) · 4 = 28
    assert formula_3([1.0, 2.0, 4.0, 3.0], [0.1, 0.2, 0.2], 8) == pytest.approx(38.5)


def test_formula_3_with_one_micro_batch_is_one_walk_through_the_stages() -> None:
    assert formula_3([1.0, 2.0], [0.5], 1) == pytest.approx(3.5)


@pytest.mark.parametrize(("hpps", "alpa", "error"), [(5.23, 4.95, 5.59), (8.17, 8.62, 5.18), (16.61, 19.05, 12.81)])
def test_the_papers_errors_are_relative_to_alpas_times(hpps: float, alpa: float, error: float) -> None:
    assert abs(hpps / alpa - 1) * 100 == pytest.approx(error, abs=0.1)


def test_pp_is_the_number_of_nodes_and_tp_grows_until_a_stage_fits() -> None:
    found = algorithm_1(16, lambda shape: shape.ranks_per_node <= 8, lambda shape: shape.nodes <= 4, 320e9, 80e9)
    assert found == [Degrees(2, 4, 2), Degrees(4, 4, 1)]


def test_the_second_filter_is_left_out_when_one_shape_is_left() -> None:
    assert algorithm_1(8, lambda shape: shape == Shape(1, 8), lambda shape: False, 1.0, 1e9) == [Degrees(1, 8, 1)]


def test_a_shape_with_which_nothing_fits_is_left_out() -> None:
    assert algorithm_1(8, lambda shape: shape == Shape(1, 8), lambda shape: True, 1e12, 80e9) == []


def test_formula_3_refuses_a_transfer_too_many() -> None:
    with pytest.raises(ValueError, match="2 stages, 2 transfers"):
        formula_3([1.0, 1.0], [0.0, 0.0], 4)
