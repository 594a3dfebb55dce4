"""The models that are predicted and measured on one GPU: they are the ones that the planner counts, and the errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import planner_gpu
from resilio_hpc.autoparallel.measure.profile_file import read
from resilio_hpc.autoparallel.model.transformer import Transformer, Transformers
from resilio_hpc.cli import main


@pytest.mark.parametrize("size", [*planner_gpu.SIZES["gpt3"], *planner_gpu.SIZES["tiny"]], ids=lambda size: size.name)
def test_the_measured_model_has_the_parameters_that_the_planner_counts(size: planner_gpu.Size) -> None:
    with torch.device("meta"):
        model = planner_gpu.GPT(size)
    counted = Transformers.of(
        [Transformer(size.layers, size.hidden, size.heads, 4 * size.hidden, size.vocab, size.seq, tied=True, name="")]
    ).parameters[0]
    assert sum(one.numel() for one in model.parameters()) == pytest.approx(counted, rel=0.06)


@pytest.mark.slow
def test_a_step_runs_on_a_cpu_for_trying() -> None:
    rows = list(planner_gpu.compared("tiny", torch.device("cpu"), None))
    assert [row.name for row in rows] == ["tiny", "small"]
    assert all(row.step_s > 0 and row.predicted_s > 0 and row.bytes is None for row in rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_steps_and_memory_of_five_transformers_are_predicted_from_a_profile_of_this_gpu(tmp_path: Path) -> None:
    path = tmp_path / "gpu.h5"
    assert main.main(["plan", "profile", f"--out={path}"]) == 0
    for row in planner_gpu.compared("gpt3", torch.device("cuda"), read(path)):
        assert row.predicted_s == pytest.approx(row.step_s, rel=0.05), row
        assert row.predicted_bytes == pytest.approx(row.bytes, rel=0.05), row
