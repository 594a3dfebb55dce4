"""Counters: only a rise since we look counts, within an hour, resets and forgeries of what was kept included."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc.prolog_epilog.base.check import Former
from resilio_hpc.prolog_epilog.base.probe import rising


def looks(per_hour: float, *series: tuple[float, int]) -> list[int]:
    """How many faults there were at each look of one counter."""
    kept: object = None
    found = []
    for now, value in series:
        faults, kept = rising({"mlx5_0/1 link_downed": value}, per_hour, Former(kept, now), "link errors")
        found.append(len(faults))
    return found


@pytest.mark.parametrize(
    ("per_hour", "series", "expected"),
    [
        (0, [(10, 7), (70, 7)], [0, 0]),  # what was before we looked is history
        (0, [(10, 7), (70, 8), (130, 8)], [0, 1, 1]),
        (0, [(10, 7), (70, 8), (400, 8), (3700, 8)], [0, 1, 1, 0]),  # an hour later it is over
        (120, [(10, 0), (70, 120), (130, 121)], [0, 0, 1]),
        (120, [(t, t // 60 * 3) for t in range(0, 3600, 60)], [0] * 41 + [1] * 19),  # slowly, and yet too many
        (5, [(10, 100), (400, 3), (800, 6)], [0, 0, 1]),  # reset in between: 3 and 3 more
        (5, [(10, 100), (70, 3)], [0, 0]),
    ],
)
def test_rises_within_an_hour_count(per_hour: float, series: list[tuple[float, int]], expected: list[int]) -> None:
    assert looks(per_hour, *series) == expected


def test_a_look_after_a_long_pause_compares_with_the_last_one() -> None:
    assert looks(0, (10, 1), (90_000, 2)) == [0, 1]


def test_the_evidence_names_device_and_counter() -> None:
    _, kept = rising({"mlx5_0/1 link_downed": 1}, 0, Former(None, 10.0), "link errors")
    ((fault,), _) = rising({"mlx5_0/1 link_downed": 3}, 0, Former(kept, 70.0), "link errors")
    assert fault.evidence == "mlx5_0/1: 2 link_downed in 60 s (link errors)"
    assert fault.device == "mlx5_0/1"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@given(JSON, st.integers(0, 2**64), st.floats(0, 1e9))
def test_whatever_was_kept_is_no_error(kept: object, value: int, now: float) -> None:
    faults, again = rising({"a b": value}, 0, Former(kept, now), "errors")
    assert isinstance(again, list) and len(faults) <= 1
