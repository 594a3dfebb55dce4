"""The time limit of collectives that a rank is given: at least a minute, and none where nothing is known."""

from __future__ import annotations

from datetime import timedelta

import pytest

from resilio_hpc.core.rank_link import COLLECTIVE_VARIABLE
from resilio_hpc.train import place


@pytest.mark.parametrize(
    ("told", "minutes"), [("660", 11), ("5", 1), ("0", None), ("", None), ("nan", None), ("x", None), ("1e300", None)]
)
def test_it_is_at_least_a_minute(told: str, minutes: int | None) -> None:
    expected = timedelta(minutes=minutes) if minutes else None
    assert place._collective_timeout({COLLECTIVE_VARIABLE: told}) == expected
    assert place._collective_timeout({}) is None
