"""DeepSpeed's ZeRO: what is its own, besides the cases that all frameworks have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.frameworks.runs import FRAMEWORKS, FrameworkRun

pytestmark = pytest.mark.slow

ZERO = FRAMEWORKS["deepspeed-3"]


@pytest.fixture(scope="module", autouse=True)
def deepspeed() -> None:
    ZERO.need()


def of_stage(stage: int, precision: str, path: Path, ranks: int, *words: str) -> FrameworkRun:
    command = [ZERO.command[0], "--epochs", "1", "--stage", str(stage), "--precision", precision, *words]
    return FrameworkRun(path, ranks, command)


def test_other_numbers_of_ranks_and_other_stages_find_their_parts(tmp_path: Path) -> None:
    four = of_stage(3, "fp32", tmp_path / "four", 4)
    four.launch()
    for stage, precision, ranks in ((3, "fp32", 2), (1, "fp32", 2), (2, "bf16", 3)):
        other = of_stage(stage, precision, tmp_path / f"{stage}", ranks)
        other.torchrun(four)
        assert set(other.end) == set(four.end)
