"""Who became slower, on drawn series: found and named, and nothing told where all is noise."""

from __future__ import annotations

import random

import pytest

from resilio_hpc.watch.slow_ranks import Slowdown, SlowWatch, WorkDone

STEPS = 8  # of a window


def windows(
    count: int, ranks: int, slow: dict[int, float] | None = None, at: int = 20, until: int = 10_000, seed: int = 1,
    usual: dict[int, float] | None = None, steps: bool = True, all_from: float = 1.0, transfer: float = 0.2,
) -> list[tuple[int, Slowdown]]:  # fmt: skip
    """Return what is reported, and in which window. ``slow``: rank → its factor, in windows ``at`` … ``until``."""
    draw, watch, found = random.Random(seed), SlowWatch(), []
    for number in range(count):
        own, wait = [0.0] * ranks, [0.0] * ranks
        hits = at <= number < until
        for _ in range(STEPS):
            work = [(usual or {}).get(rank, 1.0) * draw.lognormvariate(0, 0.1) for rank in range(ranks)]
            if draw.random() < 0.05:
                work[draw.randrange(ranks)] += draw.uniform(0.5, 3)  # a collection of garbage
            for rank, factor in (slow or {}).items() if hits else ():
                work[rank] *= factor
            work = [one * (all_from if hits else 1.0) for one in work]
            step = max(work) + transfer
            for rank, one in enumerate(work):
                own[rank] += one
                wait[rank] += step - one
        if draw.random() < 0.1:  # an evaluation, in which rank 0 works
            own[0] += 5
            wait[1:] = [one + 5 for one in wait[1:]]
        done = {rank: WorkDone(own[rank], wait[rank], 20 * STEPS, STEPS if steps else 0) for rank in range(ranks)}
        found += [(number, change) for change in watch.look(done)]
    return found


@pytest.mark.parametrize("ranks", [2, 4, 16, 64])
@pytest.mark.parametrize("steps", [True, False], ids=["steps", "calls alone"])
def test_a_slow_rank_is_named_soon_and_no_other(ranks: int, steps: bool) -> None:
    slow = ranks - 1
    told = windows(36, ranks, {slow: 1.8}, steps=steps)
    ((when, found),) = told
    assert (found.rank, found.what, found.over, found.since_start) == (slow, "own", False, False)
    assert 1.5 < found.ratio < 2.1
    assert 24 <= when <= 30
    assert found.cost > 0.2


def test_it_is_over_when_the_rank_is_as_fast_as_before_and_told_once() -> None:
    told = windows(80, 8, {3: 2.0}, at=20, until=50)
    assert [(change.rank, change.over) for _, change in told] == [(3, False), (3, True)]
    assert 50 < told[1][0] < 60


def test_ranks_that_take_turns_are_told_a_few_times_and_one_that_stays_slow_still_is() -> None:
    """The expert with the most tokens is another rank's every 40 s; then one rank becomes slow for good."""
    draw, watch, told = random.Random(1), SlowWatch(), []
    for number in range(300):
        slowest = number // 8 % 8 if number < 250 else 5
        work = [STEPS * (1.8 if rank == slowest and number >= 20 else 1.0) * draw.lognormvariate(0, 0.03)
                for rank in range(8)]  # fmt: skip
        step = max(work) + 0.2
        window = {rank: WorkDone(one, step - one, 20 * STEPS, STEPS) for rank, one in enumerate(work)}
        told += [(number, change) for change in watch.look(window) if not change.over]
    assert 3 <= sum(number < 250 for number, _ in told) <= 5
    assert [change.rank for number, change in told if number >= 260] == [5]


def test_all_ranks_of_a_node_are_named_even_where_they_are_half_of_all() -> None:
    told = windows(36, 8, dict.fromkeys(range(4, 8), 1.8))
    assert {change.rank for _, change in told} == {4, 5, 6, 7}


def test_where_all_are_slower_no_rank_is_blamed() -> None:
    told = windows(40, 8, all_from=1.8)
    assert [(change.rank, change.what) for _, change in told] == [(-1, "own")]


@pytest.mark.parametrize("seed", range(4))
def test_noise_is_no_slow_rank(seed: int) -> None:
    assert windows(400, 8, seed=seed) == []


def test_unequal_work_is_usual() -> None:
    assert windows(100, 8, usual={0: 1.4, 5: 0.4, 6: 0.5, 7: 0.4}) == []


def test_a_rank_that_never_kept_up_with_its_peers_is_told_and_marked() -> None:
    ((_, found),) = windows(40, 8, usual={5: 1.9})
    assert (found.rank, found.since_start) == (5, True)


def test_a_slowness_that_costs_the_run_little_is_not_told() -> None:
    assert windows(60, 8, {5: 1.5}, usual=dict.fromkeys(range(8), 0.02), transfer=2.0) == []


def test_windows_of_less_than_three_steps_are_put_together() -> None:
    watch = SlowWatch()
    for _ in range(30):
        assert watch.look({0: WorkDone(4.0, 1.0, 1, 1), 1: WorkDone(4.0, 1.0, 1, 1)}) == []
    assert watch._own.windows == 10


def test_ranks_of_which_a_window_knows_too_little_are_left_out() -> None:
    watch = SlowWatch()
    for number in range(40):
        known = {rank: WorkDone(4.0, 1.0, 50, 8) for rank in range(4)}
        if number % 3 == 0:
            known[2] = WorkDone(0.5, 0.0, 5, 1)
        assert watch.look(known) == []


def test_steps_that_are_found_late_or_take_longer_than_a_window_are_no_slowdown() -> None:
    watch, found = SlowWatch(), []
    for number in range(120):
        steps = 0 if number < 30 else number % 4 == 0  # a step lasts for four windows
        found += watch.look({rank: WorkDone(4.0, 1.0, 100, int(steps)) for rank in range(4)})
    assert found == []
