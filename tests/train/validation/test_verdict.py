"""Verdicts from the same work computed again: in place, and by the next rank."""

from __future__ import annotations

import math
import random

import pytest

from resilio_hpc.train.validation.verdict import (
    StepFinding,
    StepOutcome,
    after_exchange,
    after_rerun,
    difference,
)

NAN = StepOutcome(math.nan, math.nan, 99, "loss is NaN")


def good(at: int) -> StepOutcome:
    return StepOutcome(2.0 + at / 10, 1.0 + at / 10, 1000 + at)


def work(ranks: int) -> list[StepOutcome]:
    return [good(at) for at in range(ranks)]


def changed(outcomes: list[StepOutcome], at: int, one: StepOutcome) -> list[StepOutcome]:
    return [one if place == at else outcome for place, outcome in enumerate(outcomes)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_what_does_not_come_again_is_transient_and_its_rank_is_known(ranks: int) -> None:
    first = changed(work(ranks), ranks - 1, NAN)
    assert after_rerun(first, work(ranks), 0.0) == StepFinding("transient", ranks - 1)


def test_after_a_sum_over_the_ranks_the_loss_tells_whose_result_it_was() -> None:
    summed = [StepOutcome(2.0 + at / 10, math.nan, 7, "gradient norm is NaN") for at in range(3)]
    first = changed(summed, 1, StepOutcome(math.nan, math.nan, 7, "loss is NaN"))
    again = [StepOutcome(2.0 + at / 10, 1.0, 5) for at in range(3)]
    assert after_rerun(first, again, 0.0) == StepFinding("transient", 1)
    assert after_rerun(summed, again, 0.0) == StepFinding("transient", -1)  # of a backward pass: not known whose


def test_what_comes_again_is_judged_elsewhere() -> None:
    assert after_rerun([NAN, good(1)], [NAN, good(1)], 0.0) is None


@pytest.mark.parametrize("ranks", [2, 3, 4, 9])
@pytest.mark.parametrize("wrong", [NAN, StepOutcome(9e9, 8e9, 98, "loss is 9e+09")])
def test_a_faulty_device_gives_wrong_results_for_its_own_and_its_neighbours_work(
    ranks: int, wrong: StepOutcome
) -> None:
    for faulty in range(ranks):
        home = changed(work(ranks), faulty, wrong)
        away = changed(work(ranks), (faulty - 1) % ranks, wrong)
        assert after_exchange(home, away, 0.0) == StepFinding("persistent", faulty)


def test_a_faulty_device_is_found_by_bits_that_no_check_sees() -> None:
    home = changed(work(4), 2, StepOutcome(2.2, 1.2, 5555))
    away = changed(work(4), 1, StepOutcome(2.1, 1.1, 6666))
    assert after_exchange(home, away, 0.0) == StepFinding("persistent", 2)
    assert after_exchange(home, away, 1e-6) == StepFinding("deterministic", -1)  # where results differ anyway


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_what_comes_again_elsewhere_is_deterministic(ranks: int) -> None:
    home = changed(work(ranks), 1, NAN)
    assert after_exchange(home, list(home), 0.0) == StepFinding("deterministic", 1)
    far = changed(work(ranks), 0, StepOutcome(2.0, 1e9, 5))  # suspect only beside the others
    assert after_exchange(far, list(far), 0.0) == StepFinding("deterministic", 0 if ranks > 2 else -1)


def test_two_replicas_of_which_none_is_wrong_cannot_be_told_apart() -> None:
    home = changed(work(2), 0, StepOutcome(2.0, 1.0, 7777))
    assert after_exchange(home, work(2), 0.0).verdict == "unresolved"


def test_a_fault_that_shows_only_with_some_data_is_blamed_by_its_wrong_result() -> None:
    home = changed(work(4), 3, NAN)
    assert after_exchange(home, work(4), 0.0) == StepFinding("persistent", 3)


def test_where_gradients_were_summed_already_losses_decide() -> None:
    def summed(digest: int, wrong: int) -> list[StepOutcome]:
        return [
            StepOutcome(math.nan if at == wrong else 2.0 + at / 10, math.nan, digest, "gradient norm is NaN")
            for at in range(3)
        ]

    # rank 1 is faulty: its own work, and that of rank 0, which it computes for it
    assert after_exchange(summed(4, 1), summed(5, 0), 0.0) == StepFinding("persistent", 1)
    assert after_exchange(summed(4, 1), summed(5, 1), 0.0).verdict == "deterministic"


def test_differences() -> None:
    one = StepOutcome(1.0, 2.0, 3)
    assert difference(one, StepOutcome(1.0, 2.0, 3, "why")) == 0.0
    assert difference(one, StepOutcome(1.0, 2.0, 4)) == 2.0**-53
    assert difference(one, StepOutcome(1.1, 2.0, 4)) == pytest.approx(0.1 / 1.1)
    assert difference(one, NAN) == 1.0
    assert difference(NAN, StepOutcome(math.nan, 5.0, 1)) == 0.0
    assert difference(StepOutcome(0.0, 0.0, 1), StepOutcome(0.0, 0.0, 2)) == 2.0**-53


def test_noise_below_its_measure_is_no_difference() -> None:
    draw = random.Random(5)
    for _ in range(100):
        first = work(4)
        again = [StepOutcome(one.loss * (1 + draw.uniform(-1, 1) * 1e-7), one.norm, one.digest + 1) for one in first]
        first = changed(first, 2, NAN)
        assert after_rerun(first, again, 1e-6) == StepFinding("transient", 2)
        assert after_exchange(changed(again, 2, NAN), first, 1e-6) == StepFinding("deterministic", 2)
