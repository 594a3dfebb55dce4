"""What may go, and what never does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc.ckpt.retention import Retention

DAY = 86400.0
STEPS = [(100 * number, DAY * number) for number in range(1, 11)]  # 100 … 1000, a day apart


@pytest.mark.parametrize(
    ("retention", "gone"),
    [
        (Retention(3), [100, 200, 300, 400, 500, 600, 700]),
        (Retention(3, keep_every=250), [100, 200, 300, 400, 600, 700]),
        (Retention(3, keep_every=500, max_age_s=3 * DAY), [100, 200, 300, 400, 500, 600, 700]),
        (Retention(5, max_age_s=2.5 * DAY), [100, 200, 300, 400, 500, 600, 700]),
        (Retention(20), []),
        (Retention(1), [step for step, _ in STEPS[:-1]]),
    ],
)
def test_last_ones_milestones_and_age(retention: Retention, gone: list[int]) -> None:
    assert retention.expendable(STEPS, 10 * DAY) == gone


def test_the_order_is_that_of_the_commits_not_of_the_numbers() -> None:
    assert Retention(2).expendable([(300, 1.0), (100, 2.0), (200, 3.0)], 4.0) == [300]


@given(st.lists(st.integers(0, 9), unique=True, min_size=1), st.integers(0, 5), st.integers(0, 5), st.floats(0, 1e6))
def test_the_step_committed_last_always_stays(steps: list[int], last: int, every: int, age: float) -> None:
    gone = Retention(last, every, age).expendable([(step, float(step)) for step in steps], 1e9)
    assert steps[-1] not in gone
    assert len(gone) == len(set(gone))
