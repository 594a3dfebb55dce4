"""The learned limit over seeded series of step times: low enough soon, never far above normal steps, no false alarm."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice

import pytest

from resilio_hpc.watch.learned_limit import LEAST_S, TIMES_AS_LONG, LearnedLimit

SEEDS = range(20)
STEPS = 5000


def even(chance: random.Random, step_s: float) -> Iterator[float]:
    """Steps that differ by a tenth."""
    while True:
        yield step_s * chance.uniform(0.95, 1.05)


def loaded(chance: random.Random, step_s: float) -> Iterator[float]:
    """Steps on nodes that others use, too: now and then one takes up to twice as long."""
    while True:
        yield step_s * (chance.uniform(1.5, 2.0) if chance.random() < 0.05 else chance.lognormvariate(0.0, 0.05))


def saving(chance: random.Random, step_s: float) -> Iterator[float]:
    """Every 50th step holds a save that takes as long as a step, as a loop without sections has it."""
    for number, wait_s in enumerate(loaded(chance, step_s)):
        yield wait_s + (step_s if number % 50 == 49 else 0.0)


SERIES = (even, loaded, saving)


@pytest.mark.parametrize("step_s", [0.05, 1.0, 30.0])
@pytest.mark.parametrize("series", SERIES, ids=lambda series: series.__name__)
def test_no_false_alarm_and_never_far_above_normal_steps(
    series: Callable[[random.Random, float], Iterator[float]], step_s: float
) -> None:
    for seed in SEEDS:
        limit, longest_s = LearnedLimit(), 0.0
        for number, wait_s in enumerate(islice(series(random.Random(seed), step_s), STEPS)):
            seconds = limit.seconds
            if seconds is not None:
                assert wait_s <= seconds, f"false alarm at step {number} of seed {seed}"
                assert seconds <= max(LEAST_S, 5.0 * longest_s)
            limit.learn(wait_s)
            longest_s = max(longest_s, wait_s)
            if step_s == 0.05 and number >= 50:
                assert (limit.seconds or 99.0) <= 2.0


def test_one_hang_of_minutes_raises_it_to_what_normal_steps_allow() -> None:
    for seed in SEEDS:
        limit = LearnedLimit()
        normal = list(islice(loaded(random.Random(seed), 1.0), 100))
        for wait_s in (*normal, 600.0):
            limit.learn(wait_s)
        assert limit.seconds == TIMES_AS_LONG * max(normal)
