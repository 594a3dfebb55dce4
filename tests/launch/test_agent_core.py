"""What an agent does by itself, whoever leads."""

from __future__ import annotations

import pytest

from resilio_hpc.launch.agent_core import beat_interval_s


@pytest.mark.parametrize(
    ("timeout_s", "agents", "interval_s"),
    [(5.0, 2, 0.625), (5.0, 1000, 0.625), (5.0, 3200, 0.8), (5.0, 4000, 1.0), (5.0, 10_000, 1.0), (2.0, 4000, 0.4),
     (60.0, 4, 1.0)],
)  # fmt: skip
def test_thousands_of_agents_beat_less_often_but_five_times_in_a_timeout(
    timeout_s: float, agents: int, interval_s: float
) -> None:
    assert beat_interval_s(timeout_s, agents) == interval_s
