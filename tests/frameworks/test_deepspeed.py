"""DeepSpeed's ZeRO: what is its own, besides the cases that all frameworks have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.frameworks.runs import FRAMEWORKS, SCALED, FrameworkRun

pytestmark = pytest.mark.slow

ZERO = FRAMEWORKS["deepspeed-3"]


@pytest.fixture(scope="module", autouse=True)
def deepspeed() -> None:
    ZERO.need()


def of_stage(stage: int, precision: str, path: Path, ranks: int, *words: str) -> FrameworkRun:
    command = [ZERO.command[0], "--epochs", "1", "--stage", str(stage), "--precision", precision, *words]
    return FrameworkRun(path, ranks, [SCALED, *command] if precision == "fp16" else command)


def test_other_numbers_of_ranks_and_other_stages_find_their_parts(tmp_path: Path) -> None:
    four = of_stage(3, "fp32", tmp_path / "four", 4)
    four.launch()
    for stage, precision, ranks in ((3, "fp32", 2), (1, "fp32", 2), (2, "bf16", 3)):
        other = of_stage(stage, precision, tmp_path / f"{stage}", ranks)
        other.torchrun(four)
        assert set(other.end) == set(four.end)


@pytest.mark.parametrize(
    ("stage", "precision", "words"),
    [
        (1, "fp16", ("--own-loader",)),
        (2, "fp16", ("--own-loader", "--offload", "--accumulate", "2")),
        (3, "bf16", ("--offload", "--width", "1024")),
        (3, "fp16", ("--own-loader", "--offload")),
    ],
)
def test_loss_scale_offloaded_optimizer_and_own_loader_go_on(
    tmp_path: Path, stage: int, precision: str, words: tuple[str, ...]
) -> None:
    """A rank is killed in the second epoch, which DeepSpeed's own loader reads with workers.

    Without steps that are skipped, step 28 is the first one again: powers of the betas are not the products of factors.
    """
    every, struck = (4, 13) if precision == "fp16" else (9, 29)
    words = (*words, "--epochs", "3", "--every", str(every))
    whole, killed = (of_stage(stage, precision, tmp_path / name, 2, *words) for name in ("whole", "killed"))
    whole.launch()
    killed.launch(str(struck), "1", "kill")
    first, restored = killed.restored()
    assert first == -1 and restored > 0 and restored % every == 0
    assert killed.end == whole.end
    if precision == "fp16":
        last = whole.end[0].splitlines()[-1].split()
        assert last[0] == "skipped" and int(last[1]) > 1  # gradients that overflowed have changed the scale
