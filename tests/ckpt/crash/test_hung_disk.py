"""A parallel file system that hangs: training goes on, is told, and saves again when it is over."""

from __future__ import annotations

import pytest

from tests.support.crash.harm import Harmed


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scenario", ["alone", "by disk"])
def test_training_goes_on_at_whichever_call_the_file_system_hangs(scenario: str, every: int, harmed: Harmed) -> None:
    """Saves return while the call of the first one still has not; only then is the file system let go."""
    calls = harmed("hang_everywhere.py", scenario, SHIM_EVERY=str(every))
    kinds = {"open", "pwrite", "uring", "fsync", "rename"}
    assert kinds <= calls.keys() or (every > 1 and len(kinds & calls.keys()) > 2)


def test_it_goes_on_while_the_saver_process_hangs(harmed: Harmed) -> None:
    assert harmed("hang_everywhere.py", "own process")


def test_processes_that_gave_up_different_steps_save_together_again(harmed: Harmed) -> None:
    harmed("hang_everywhere.py", "one of two")
