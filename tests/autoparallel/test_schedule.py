"""Closed forms of the schedules, against a simulation pass by pass."""

import math
from itertools import pairwise, product

import numpy as np
import pytest

from resilio_hpc.autoparallel.cost.schedule import (
    interleaved_order,
    one_f_one_b_order,
    pipeline_time,
    simulate,
)


def closed(slowest: float, total: float, micro_batches: int, vpp: int = 1, zero_bubble: int = 0) -> float:
    values = (slowest, total, micro_batches, vpp, zero_bubble)
    return float(pipeline_time(*(np.array([float(value)]) for value in values))[0])


@pytest.mark.parametrize(("stages", "micro_batches"), list(product([1, 2, 3, 5, 8], [1, 2, 4, 7, 16])))
def test_equal_stages_take_what_the_closed_form_says(stages: int, micro_batches: int) -> None:
    orders = [one_f_one_b_order(stage, stages, micro_batches) for stage in range(stages)]
    end = max(one.end_s for one in simulate(orders, [1.0] * stages, [2.0] * stages))
    assert end == pytest.approx(closed(3.0, 3.0 * stages, micro_batches))


@pytest.mark.parametrize(("stages", "chunks", "rounds"), list(product([2, 3, 4], [2, 3, 4], [1, 2, 4])))
def test_interleaving_divides_the_bubble(stages: int, chunks: int, rounds: int) -> None:
    count = stages * rounds
    orders = [interleaved_order(stage, stages, count, chunks) for stage in range(stages)]
    end = max(one.end_s for one in simulate(orders, [1.0 / chunks] * stages, [2.0 / chunks] * stages))
    assert end == pytest.approx(closed(3.0, 3.0 * stages, count, chunks))


@pytest.mark.parametrize("slow", range(4))
def test_one_slow_stage_sets_the_pace(slow: int) -> None:
    forward = [2.0 if stage == slow else 1.0 for stage in range(4)]
    backward = [2 * time for time in forward]
    orders = [one_f_one_b_order(stage, 4, 32) for stage in range(4)]
    end = max(one.end_s for one in simulate(orders, forward, backward))
    assert end <= closed(6.0, 15.0, 32) <= 1.05 * end  # the closed form is the safe side


def test_every_pass_runs_once_and_a_stage_runs_one_at_a_time() -> None:
    passes = simulate([interleaved_order(stage, 4, 8, 2) for stage in range(4)], [1.0] * 4, [2.0] * 4)
    assert len({(p.stage, p.chunk, p.micro_batch, p.forward) for p in passes}) == len(passes) == 4 * 8 * 2 * 2
    for stage in range(4):
        own = sorted((p.start_s, p.end_s) for p in passes if p.stage == stage)
        assert all(first[1] <= second[0] for first, second in pairwise(own))


def test_1f1b_holds_no_more_micro_batches_than_stages() -> None:
    for stage in range(4):
        held = most = 0
        for _, _, forward in one_f_one_b_order(stage, 4, 16):
            held += 1 if forward else -1
            most = max(most, held)
        assert most == 4 - stage


def test_orders_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="wait"):
        simulate([[(0, 0, False), (0, 0, True)], [(0, 0, True), (0, 0, False)]], [1.0] * 2, [1.0] * 2)


def test_interleaving_wants_whole_rounds() -> None:
    with pytest.raises(ValueError, match="multiple"):
        interleaved_order(0, 4, 6, 2)


def test_zero_bubble_leaves_a_third() -> None:
    assert math.isclose(closed(3.0, 12.0, 8, 1, 1) - 24.0, (closed(3.0, 12.0, 8) - 24.0) / 3)
