"""A file system that fills up is told in time, and not again and again."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.ckpt.store.space_trend import SpaceTrend

GB = 10**9
HOUR = 3600.0


def told(trend: SpaceTrend, hours: range, free: float, per_hour: float, step: float = 1.0) -> dict[int, str]:
    """What is told at which hour while free space changes steadily."""
    found = {}
    for hour in hours:
        text = trend.committed(hour * HOUR, int((free + per_hour * hour) * GB), int(step * GB))
        if text:
            found[hour] = text
    return found


def test_what_does_not_fall_is_never_told() -> None:
    for per_hour in (0.0, 0.5):
        assert told(SpaceTrend(), range(100), 50.0, per_hour) == {}


def test_what_falls_is_told_a_day_before_and_then_when_half_of_it_is_over() -> None:
    found = told(SpaceTrend(), range(98), 100.0, -1.0)  # no room for a step after hour 99
    assert found[75] == "25.0 GB are free; as it goes, there is no room for a step in 24 h"
    assert [*found] == [75, 87, 93, 96]
    assert found[96].endswith("in 3 h")


def test_steps_that_come_and_go_are_no_trend() -> None:
    trend = SpaceTrend()
    assert [trend.committed(60.0 * n, (50 - n % 5) * GB, GB) for n in range(200)] == [""] * 200


def test_nothing_is_concluded_from_a_few_minutes() -> None:
    trend = SpaceTrend()
    assert [trend.committed(30.0 * n, (50 - n) * GB, GB) for n in range(20)] == [""] * 20
    assert trend.committed(600.0, 30 * GB, GB) == "30.0 GB are free; as it goes, there is no room for a step in 14 min"


def test_too_little_for_another_step_is_told_once_until_there_is_room_again() -> None:
    trend = SpaceTrend()
    assert trend.committed(0.0, GB // 2, GB) == "0.5 GB are free, less than the 1.0 GB of a step"
    assert trend.committed(1.0, GB // 2, GB) == ""
    assert trend.committed(2.0, 5 * GB, GB) == ""
    assert trend.committed(3.0, GB // 2, GB) != ""


def test_a_run_hears_of_it(disk_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("resilio_hpc.ckpt.saver.saver_process._new", lambda: None)  # a thread of this process writes
    monkeypatch.setattr("resilio_hpc.ckpt.saver.saver_process._idle", [])
    checkpointer = Checkpointer(disk_path / "steps")
    checkpointer.save(1, {"x": np.ones(1000)}).wait(timeout_s=60)
    assert capfd.readouterr().err == ""
    found = os.statvfs

    class Full:
        f_bavail, f_frsize, f_flag = 1, 4096, 0

    monkeypatch.setattr(os, "statvfs", lambda path: Full if Path(path) == disk_path / "steps" else found(path))
    monkeypatch.setattr("resilio_hpc.ckpt.store.backend.Store.check_space", lambda *_: None)
    for step in (2, 3):
        checkpointer.save(step, {"x": np.ones(1000)}).wait(timeout_s=60)
    said = capfd.readouterr().err
    assert said.count("less than the 0.0 GB of a step") == 1
    assert str(disk_path / "steps") in said
