"""Accelerate, the real one, under the real launcher: whatever ends a life of it, the bits are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.environments import ROOT
from tests.support.frameworks.runs import STRIKE, FrameworkRun, need_framework

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples" / "train_accelerate.py"
STEPS = 48


@pytest.fixture(scope="module", autouse=True)
def accelerate() -> None:
    need_framework("accelerate")


def run(path: Path, *words: str, ranks: int = 2) -> FrameworkRun:
    return FrameworkRun(path, ranks, [str(EXAMPLE), "--epochs", "3", "--hash-file", "end.json", *words])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> FrameworkRun:
    made = run(tmp_path_factory.mktemp("undisturbed"))
    made.launch()
    assert made.end["step"] == STEPS
    return made


@pytest.mark.parametrize(("step", "how"), [(21, "kill"), (16, "kill"), (21, "raise")])
def test_a_failure_costs_no_finished_step(undisturbed: FrameworkRun, tmp_path: Path, step: int, how: str) -> None:
    """In the midst of an epoch, and in an epoch's first step; nothing was saved before."""
    disturbed = run(tmp_path, "--every", "1000")
    disturbed.launch(STRIKE, str(step), "1", how)
    first = disturbed.events("first_step")[-1]
    assert (first["restored"], first["source"]) == (step, "memory")
    assert disturbed.end == undisturbed.end


def test_an_agreed_stop_is_gone_on_from(undisturbed: FrameworkRun, tmp_path: Path) -> None:
    stopped = run(tmp_path, "--every", "1000", "--step-seconds", "0.05")
    stopped.stop_and_go_on(11)
    (committed, end) = (event["step"] for event in stopped.events("committed"))
    assert 11 <= committed < end == STEPS
    assert [event["restored"] for event in stopped.events("first_step")][1:] == [committed]
    assert stopped.end == undisturbed.end


def test_steps_of_three_ranks_that_accumulate_batches_of_workers(tmp_path: Path) -> None:
    """Three: with two, the order in which DDP sums makes no difference."""
    words = ["--accumulate", "2", "--workers", "1", "--every", "4"]
    whole, disturbed = (run(tmp_path / name, *words, ranks=3) for name in ("whole", "disturbed"))
    whole.launch()
    disturbed.launch(STRIKE, "9", "2", "kill")
    assert [event["restored"] for event in disturbed.events("first_step")][1:] == [9]
    assert disturbed.end == whole.end


def test_the_view_has_steps_and_loss(undisturbed: FrameworkRun) -> None:
    (planned,) = undisturbed.events("steps_planned")
    assert planned["start"] == 0
    logged = undisturbed.events("logged")
    assert logged and any("loss" in event["values"] for event in logged)
