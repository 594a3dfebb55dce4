"""Closed forms of the schedules, against a simulation pass by pass."""

from itertools import pairwise, product

import numpy as np
import pytest

from resilio_hpc.autoparallel.base.layout import Schedule
from resilio_hpc.autoparallel.cost.schedule import (
    StageSeconds,
    bubble,
    in_flight,
    interleaved_order,
    one_f_one_b_order,
    pipeline_time,
    simulate,
)

THIRD = 1 / 3


def closed(
    slowest: float, total: float, micro_batches: int, vpp: int = 1, schedule: Schedule = Schedule.ONE_F_ONE_B
) -> float:
    """Seconds in closed form, with forward, gradients of inputs and of weights a third each."""
    column = [np.array([float(value)]) for value in (slowest, total, THIRD, THIRD)]
    stages = round(total / slowest)
    rest = (np.array([float(value)]) for value in (micro_batches, stages, vpp, schedule))
    return float(pipeline_time(StageSeconds(*column), *rest)[0])


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


@pytest.mark.parametrize(
    ("stages", "chunks", "count"), [(4, 2, 6), (4, 3, 10), (8, 2, 12), (4, 3, 2), (4, 2, 3), (8, 3, 5)]
)
def test_longer_rounds_cost_nothing_and_shorter_ones_wait(stages: int, chunks: int, count: int) -> None:
    orders = [interleaved_order(stage, stages, count, chunks) for stage in range(stages)]
    end = max(one.end_s for one in simulate(orders, [1.0 / chunks] * stages, [2.0 / chunks] * stages))
    assert end == pytest.approx(closed(3.0, 3.0 * stages, count, chunks))
    waiting = 3.0 * (chunks - 1) * max(stages - count, 0) / chunks
    assert end == pytest.approx(3.0 * count + 3.0 * (stages - 1) / chunks + waiting)


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
        interleaved_order(0, 4, 9, 2)


@pytest.mark.parametrize(
    ("schedule", "left"),
    [
        (Schedule.GPIPE, 1.0),
        (Schedule.ZBH1, 1 / 3),  # arXiv:2401.10241, table 1: (p - 1)(F + B - W)
        (Schedule.ZB1P, 1 / 3),
        (Schedule.ZB2P, 0.0),  # (p - 1)(F + B - 2W)
        (Schedule.ZBV, 0.0),
        (Schedule.DUALPIPE, 2 / 9),  # arXiv:2412.19437, table 2, with 4 stages
    ],
)
def test_schedules_leave_of_the_bubble_what_their_papers_say(schedule: Schedule, left: float) -> None:
    bubble = closed(3.0, 12.0, 8) - 24.0
    assert closed(3.0, 12.0, 8, 1, schedule) - 24.0 == pytest.approx(left * bubble)


def test_cheap_gradients_of_weights_fill_little_of_the_bubble() -> None:
    # the profile of a model of 1.5B parameters: F, B, W of 18.5, 18.1 and 9.3 ms (arXiv:2401.10241, table 9)
    whole = 18.5 + 18.1 + 9.3
    forward, weights = np.array([18.5 / whole]), np.array([9.3 / whole])
    eight = np.array([8.0])
    assert bubble(forward, weights, eight, np.array([float(Schedule.ZB1P)]))[0] == pytest.approx(0.595, abs=0.01)
    assert bubble(forward, weights, eight, np.array([float(Schedule.ZB2P)]))[0] == pytest.approx(0.392, abs=0.01)


@pytest.mark.parametrize(
    ("schedule", "held"),
    [
        (Schedule.ONE_F_ONE_B, [8, 7, 6, 5, 4, 3, 2, 1]),
        (Schedule.GPIPE, [32] * 8),
        (Schedule.ZBH1, [8] * 8),
        (Schedule.ZB2P, [16] * 8),
        (Schedule.DUALPIPE, [9] * 8),
    ],
)
def test_every_stage_holds_as_many_micro_batches_as_its_schedule_warms_up_with(
    schedule: Schedule, held: list[int]
) -> None:
    after = np.arange(7, -1, -1.0)
    rest = (np.array([float(value)]) for value in (32, 8, 1, schedule))
    assert list(np.broadcast_to(in_flight(after, *rest), 8)) == held


@pytest.mark.parametrize(
    ("stages", "chunks", "micro_batches"), [(16, 8, 16), (16, 8, 32), (4, 2, 8), (8, 3, 8), (4, 2, 7)]
)
def test_an_interleaved_stage_holds_what_its_order_of_passes_leaves_open(
    stages: int, chunks: int, micro_batches: int
) -> None:
    for stage in range(stages):
        steps = [1 if forward else -1 for _, _, forward in interleaved_order(stage, stages, micro_batches, chunks)]
        most = int(np.cumsum(steps).max())
        rest = (np.array([float(value)]) for value in (micro_batches, stages, chunks, Schedule.ONE_F_ONE_B))
        assert in_flight(np.array([stages - 1.0 - stage]), *rest)[0] * chunks == pytest.approx(most)
