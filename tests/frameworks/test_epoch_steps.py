"""The loop that adapters share, with a script that has no framework."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.environments import SUPPORT
from tests.support.frameworks.counted import EPOCHS, SAMPLES
from tests.support.frameworks.runs import FrameworkRun
from tests.support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow


def test_two_ranks_go_on_with_the_samples_that_four_have_left(tmp_path: Path) -> None:
    command = [str(SUPPORT / "frameworks" / "counted.py")]
    four, two = (FrameworkRun(tmp_path, ranks, command, is_watched=False) for ranks in (4, 2))
    first = four.start()
    until((tmp_path / "struck").exists, "a step is under way", lambda: first.poll())
    first.terminate()
    until(lambda: four.events("stopping"), "the stop is under way", lambda: first.poll())
    (tmp_path / "go on").touch()
    said, _ = first.communicate(timeout=PATIENCE_S)
    assert 5 < four.events("committed")[-1]["step"] < SAMPLES // 8, said[-3000:]  # in the midst of the first epoch
    two.launch()
    for epoch in range(EPOCHS):
        seen = sorted(int(line) for line in (tmp_path / f"seen-{epoch}").read_text().splitlines())
        assert seen == list(range(SAMPLES))
