"""The loop that adapters share, with a script that has no framework."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilio_hpc.frameworks.epoch_steps import EpochSteps
from tests.support.environments import SUPPORT
from tests.support.frameworks.counted import EPOCHS, SAMPLES
from tests.support.frameworks.runs import FrameworkRun
from tests.support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow


class OwnIterator:
    """A loader as DeepSpeed's: it is its own iterator."""

    def __iter__(self) -> OwnIterator:
        self.left = iter(range(3))
        return self

    def __next__(self) -> int:
        return next(self.left)


def test_a_loader_that_is_its_own_iterator_may_be_read_before_the_epochs(tmp_path: Path) -> None:
    loader = OwnIterator()
    EpochSteps(loader, 0, tmp_path, None, {})
    assert list(loader) == list(loader) == [0, 1, 2]


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
