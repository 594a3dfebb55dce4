"""An agent that is stopped cannot end its ranks: told in time, and never because all of a job was suspended."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilio_hpc.launch.workers.forking.stopped_agent import LOOK_S, StoppedAgent

PID = 77


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / str(PID)).mkdir()
    return tmp_path


def put(proc: Path, state: str) -> None:
    (proc / str(PID) / "stat").write_text(f"{PID} (resilio-agent) {state} 1 1 1")


def looks(watch: StoppedAgent, begin: float, end: float) -> float | None:
    """When it is over, in looks at every ``LOOK_S``."""
    now = begin
    while now <= end:
        if watch.is_over(now):
            return now
        now += LOOK_S
    return None


def test_half_of_the_time_after_which_the_node_is_lost(proc: Path) -> None:
    watch = StoppedAgent(PID, 5.0, proc)
    put(proc, "S")
    assert looks(watch, 0.0, 9.5) is None
    put(proc, "T")
    assert looks(watch, 10.0, 20.0) == 12.5


def test_one_that_is_continued_in_time_is_left_alone(proc: Path) -> None:
    watch = StoppedAgent(PID, 5.0, proc)
    for begin in (0.0, 4.0, 8.0):
        put(proc, "T")
        assert looks(watch, begin, begin + 2.0) is None
        put(proc, "S")
        assert looks(watch, begin + 2.5, begin + 3.5) is None


def test_the_time_in_which_this_process_was_stopped_itself_does_not_count(proc: Path) -> None:
    watch = StoppedAgent(PID, 5.0, proc)
    put(proc, "T")
    assert looks(watch, 0.0, 1.0) is None
    assert not watch.is_over(3600.0)
    assert looks(watch, 3600.0 + LOOK_S, 3602.0) is None


def test_never_where_no_limit_is_known_or_the_agent_is_gone(proc: Path) -> None:
    put(proc, "T")
    assert looks(StoppedAgent(PID, 0.0, proc), 0.0, 100.0) is None
    assert looks(StoppedAgent(PID + 1, 5.0, proc), 0.0, 100.0) is None
