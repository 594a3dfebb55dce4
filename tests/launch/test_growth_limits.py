"""How far a run may grow at once."""

from __future__ import annotations

import pytest

from resilio_hpc.launch.resize.growth_limits import job_sizes


@pytest.mark.parametrize(
    ("nodes", "unit", "most", "sizes"),
    [
        (4, 1, 8, (1, 1, 1, 1)),
        (10, 1, 4, (3, 3, 2, 2)),
        (12, 4, 8, (4, 4, 4)),
        (12, 4, 2, (8, 4)),
        (4, 4, 0, (4,)),
        (1, 2, 8, (1,)),
        (3, 2, 8, (1, 2)),
        (3, 2, 1, (3,)),
        (7, 3, 2, (4, 3)),
    ],
)
def test_joiners_are_small_but_few(nodes: int, unit: int, most: int, sizes: tuple[int, ...]) -> None:
    assert job_sizes(nodes, unit, most) == sizes
