"""Which numbers of a step are suspect."""

from __future__ import annotations

import math
import random

import pytest

from resilio_hpc.train.validation.spikes import WARM_UP, WINDOW, SpikeJudge


def judge_of(values: list[float]) -> SpikeJudge:
    judge = SpikeJudge()
    for value in values:
        assert judge.why_suspect(value) == "", value
        judge.accept(value)
    return judge


def test_numbers_that_are_not_finite_are_suspect_from_the_first_step_on() -> None:
    judge = SpikeJudge()
    assert judge.why_suspect(math.nan) == "is NaN"
    assert judge.why_suspect(math.inf) == "is infinite"
    judge.accept(math.nan)
    assert judge.state() == b""


def test_before_the_warm_up_no_finite_number_is_suspect() -> None:
    judge = judge_of([1.0] * (WARM_UP - 1))
    assert judge.why_suspect(1e30) == ""
    judge.accept(1.0)
    assert judge.why_suspect(1e30).startswith("is 1e+30, usually 1")


@pytest.mark.parametrize("shape", ["falls", "noisy", "flat", "heavy", "grows"])
def test_usual_curves_are_not_suspect(shape: str) -> None:
    draw = random.Random(shape)
    curves = {
        "falls": [10.0 * math.exp(-step / 300) + draw.gauss(0, 0.1) for step in range(2000)],
        "noisy": [2.0 + draw.gauss(0, 0.3) for _ in range(2000)],
        "flat": [3.0 + draw.gauss(0, 1e-4) for _ in range(2000)],
        "heavy": [math.exp(draw.gauss(0, 0.3)) for _ in range(2000)],
        "grows": [1.0 + step / 1000 + draw.gauss(0, 0.02) for step in range(2000)],
    }
    judge_of(curves[shape])


def test_a_spike_is_suspect_and_a_fall_is_not() -> None:
    draw = random.Random(0)
    judge = judge_of([2.0 + draw.gauss(0, 0.05) for _ in range(200)])
    assert judge.why_suspect(4.0)
    assert judge.why_suspect(0.1) == ""


def test_a_new_level_is_suspect_twice_and_a_single_outlier_stays_one() -> None:
    judge = judge_of([1.0] * 50)
    for _ in range(2):
        assert judge.why_suspect(30.0)
        judge.explain(30.0)
        judge.accept(30.0)
    for _ in range(2 * WINDOW):
        assert judge.why_suspect(30.0) == ""
        judge.accept(30.0)
    single = judge_of([1.0] * 50)
    for _ in range(3):
        assert single.why_suspect(30.0)
        single.explain(30.0)
        for value in [30.0] + [1.0] * 9:
            single.accept(value)


def test_the_state_is_all_that_was_learned() -> None:
    judge, other = judge_of([1.0 + step % 7 / 100 for step in range(300)]), SpikeJudge()
    other.restore(judge.state())
    assert other.why_suspect(9.0) == judge.why_suspect(9.0) != ""
    assert other.state() == judge.state()
