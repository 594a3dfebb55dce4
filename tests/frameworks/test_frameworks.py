"""Frameworks, the real ones, under the real launcher: whatever ends a life of theirs, they end with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.frameworks.runs import FRAMEWORKS, SCALED, Framework, FrameworkRun

pytestmark = pytest.mark.slow

EPOCH = 16
STEPS = 3 * EPOCH


@pytest.fixture(scope="module", params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Framework:
    found = FRAMEWORKS[request.param]
    found.need()
    return found


def run(framework: Framework, path: Path, *words: str, ranks: int = 2) -> FrameworkRun:
    return FrameworkRun(path, ranks, [*framework.command, "--epochs", "3", *words])


@pytest.fixture(scope="module")
def undisturbed(framework: Framework, tmp_path_factory: pytest.TempPathFactory) -> FrameworkRun:
    made = run(framework, tmp_path_factory.mktemp("undisturbed"))
    made.launch()
    assert made.events("committed")[-1]["step"] == STEPS
    return made


@pytest.mark.parametrize(("step", "how"), [(EPOCH + 5, "kill"), (EPOCH, "kill"), (0, "kill"), (EPOCH + 5, "raise")])
def test_a_failure_costs_no_finished_step(
    framework: Framework, undisturbed: FrameworkRun, tmp_path: Path, step: int, how: str
) -> None:
    """In the midst of an epoch, in an epoch's first step, and before the first of all; nothing was saved before.

    Where each rank has parts of its own, a lost rank costs the steps since the last save.
    """
    every = 1000 if framework.replicated or how == "raise" else 3
    disturbed = run(framework, tmp_path, "--every", str(every))
    disturbed.launch(str(step), "1", how)
    first = disturbed.events("first_step")[-1]
    restored = step if every == 1000 else step // every * every
    assert max(first["restored"], 0) == restored  # -1: from the beginning, where none has held that
    assert first["source"] == "memory" or not restored
    assert disturbed.end == undisturbed.end


def test_an_agreed_stop_is_gone_on_from(framework: Framework, undisturbed: FrameworkRun, tmp_path: Path) -> None:
    stopped = run(framework, tmp_path, "--every", "1000", "--step-seconds", "0.05")
    stopped.stop_and_go_on(11)
    (committed, end) = (event["step"] for event in stopped.events("committed"))
    assert 11 <= committed < end == STEPS
    assert stopped.restored()[1:] == [committed]
    assert stopped.end == undisturbed.end


def test_steps_of_three_ranks_that_accumulate_batches_of_workers(framework: Framework, tmp_path: Path) -> None:
    """Three: with two, the order in which DDP sums makes no difference. The rank is lost within an accumulation."""
    words = ["--accumulate", "2", "--every", "4", *(["--workers", "1"] if framework.has_workers else [])]
    whole, disturbed = (run(framework, tmp_path / name, *words, ranks=3) for name in ("whole", "disturbed"))
    whole.launch()
    disturbed.launch("7", "2", "kill")
    assert disturbed.restored()[1:] == [7 if framework.replicated else 4]
    assert disturbed.end == whole.end


def test_a_gradient_scaler_goes_on_within_an_accumulation(framework: Framework, tmp_path: Path) -> None:
    if framework.script not in ("train_lightning.py", "train_accelerate.py", "train_transformers.py"):
        pytest.skip("Ignite leaves the scaler to the script; DeepSpeed's own is in test_deepspeed.py")
    command = [SCALED, *framework.command, "--epochs", "3", "--accumulate", "2", "--every", "1000"]
    whole, disturbed = (FrameworkRun(tmp_path / name, 2, command) for name in ("whole", "disturbed"))
    whole.launch()
    disturbed.launch("11", "1", "kill")
    assert disturbed.events("first_step")[-1]["restored"] >= 11
    assert "scale" in whole.end[0] and disturbed.end == whole.end


def test_the_view_has_steps_and_loss(undisturbed: FrameworkRun) -> None:
    (planned,) = undisturbed.events("steps_planned")
    assert planned["start"] == 0
    logged = undisturbed.events("logged")
    assert logged and any("loss" in event["values"] for event in logged)
