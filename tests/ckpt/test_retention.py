"""What may go, and what never does."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc.ckpt.store.retention import CommittedStep, Retention
from resilio_hpc.core.errors import UsageError

DAY = 86400.0
GB = 10**9
STEPS = [CommittedStep(100 * number, DAY * number, 2 * GB) for number in range(1, 11)]  # 100 … 1000, a day apart


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(3), [800, 900, 1000]),
        (Retention(3, keep_every=250), [500, 800, 900, 1000]),
        (Retention(3, keep_every=500, keep_hours=3 * 24), [800, 900, 1000]),
        (Retention(5, keep_hours=60), [800, 900, 1000]),
        (Retention(5, keep_hours=1e-9), [1000]),
        (Retention(20), [step.step for step in STEPS]),
        (Retention(1), [1000]),
        (Retention(20, keep_gb=7.9), [800, 900, 1000]),
        (Retention(20, keep_gb=8), [700, 800, 900, 1000]),
        (Retention(20, keep_gb=0.1), [1000]),
        (Retention(2, keep_every=300, keep_gb=7), [600, 900, 1000]),
        (Retention(2, keep_every=300, keep_gb=4), [900, 1000]),
        (Retention(2, keep_step=300), [300, 900, 1000]),
        (Retention(5, keep_hours=1e-9, keep_gb=0.1, keep_step=300), [300, 1000]),
        (Retention(2, keep_step=301), [900, 1000]),  # it is gone
    ],
)
def test_last_ones_milestones_age_and_room(retention: Retention, kept: list[int]) -> None:
    gone = retention.expendable(STEPS, 10 * DAY)
    assert [step.step for step in STEPS if step.step not in gone] == kept


def test_the_order_is_that_of_the_commits_not_of_the_numbers() -> None:
    steps = [CommittedStep(300, 1.0), CommittedStep(100, 2.0), CommittedStep(200, 3.0)]
    assert Retention(2).expendable(steps, 4.0) == [300]


@pytest.mark.parametrize(
    ("damaged", "retention", "gone"),
    [
        ({1000}, Retention(1), [100, 200, 300, 400, 500, 600, 700, 800]),  # 900: the last good one
        ({900, 1000}, Retention(1, keep_gb=1), [100, 200, 300, 400, 500, 600, 700, 900]),
        ({900}, Retention(2), [100, 200, 300, 400, 500, 600, 700]),  # 900 does not count
        ({900}, Retention(3, keep_gb=6), [100, 200, 300, 400, 500, 600, 900]),  # and goes first
        ({900}, Retention(1), [100, 200, 300, 400, 500, 600, 700, 800, 900]),
        ({step.step for step in STEPS}, Retention(2, keep_gb=1), [step.step for step in STEPS[:-1]]),
    ],
)
def test_damaged_steps_do_not_stand_in_for_good_ones(damaged: set[int], retention: Retention, gone: list[int]) -> None:
    steps = [step._replace(damaged=step.step in damaged) for step in STEPS]
    assert retention.expendable(steps, 10 * DAY) == gone


@st.composite
def histories(draw: st.DrawFn) -> list[CommittedStep]:
    """Steps in the order of their commits, which need not be that of their numbers or times."""
    numbers = draw(st.lists(st.integers(0, 40), unique=True, max_size=20))
    return [
        CommittedStep(number, draw(st.integers(0, 20)) * 3600.0, draw(st.integers(0, 5)) * GB, draw(st.booleans()))
        for number in numbers
    ]


@given(
    histories(),
    st.builds(
        Retention,
        st.integers(1, 6),
        st.integers(0, 6),
        st.none() | st.floats(0.1, 25),
        st.none() | st.floats(0.1, 60),
    ),
)
def test_whatever_is_asked(steps: list[CommittedStep], retention: Retention) -> None:
    now = 20 * 3600.0
    gone = retention.expendable(steps, now)
    kept = [step for step in steps if step.step not in gone]
    good = [step for step in steps if not step.damaged]
    stay = steps[-1:] + good[-1:]
    assert gone == [step.step for step in steps if step.step in gone]  # each once, in order
    assert all(step in kept for step in stay)
    wanted = [
        step
        for step in steps
        if step in stay
        or (
            (now - step.committed <= 3600 * (retention.keep_hours or 1e9))
            and (
                len([later for later in steps[steps.index(step) + 1 :] if later in good]) < retention.keep_last
                or (retention.keep_every and step.step % retention.keep_every == 0)
            )
        )
    ]
    if retention.keep_gb is None:
        assert kept == wanted
    else:
        room = retention.keep_gb * GB
        assert set(kept) <= set(wanted)
        assert sum(step.size_bytes for step in kept) <= room or set(kept) == set(stay)
        line = sorted((step for step in wanted if step not in stay), key=lambda step: not step.damaged)
        dropped = [step for step in line if step not in kept]
        assert dropped == line[: len(dropped)]  # damaged ones, then the oldest
        if dropped:  # and not one more than had to
            assert sum(step.size_bytes for step in kept) + dropped[-1].size_bytes > room
    assert retention.expendable(kept, now) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep_last": 0},
        {"keep_every": -1},
        {"keep_hours": 0},
        {"keep_gb": -1.5},
        {"keep_gb": float("nan")},
        {"keep_last": 2.5},
        {"keep_last": None},
        {"keep_last": True},
        {"keep_every": "10"},
        {"keep_hours": "2"},
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(wrong: dict[str, object]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(UsageError, match=f"{name} is {value!r}, it must be a "):
        Retention(**wrong)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    assert Retention(numpy.int64(2), numpy.int32(0), None, numpy.float32(1.5)) == Retention(2, 0, None, 1.5)  # type: ignore[arg-type]
