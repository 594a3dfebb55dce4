"""Examples of plain-tensor layouts and FSDP2 under the real launcher: a killed rank, a stop, the same bits."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.environments import ROOT, SUPPORT, scrubbed
from tests.support.frameworks.runs import FrameworkRun
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


class Example(NamedTuple):
    """A script, its words, and the number of its ranks.

    ``restored``: the step that is restored after 13 steps of the optimizer (with a scaler it leaves two out).
    """

    script: str
    words: tuple[str, ...]
    ranks: int
    restored: int


EXAMPLES = {
    "tensor and data parallel": Example("train_megatron_style.py", ("--tensor", "2"), 4, 10),
    "tensor and pipeline parallel": Example("train_megatron_style.py", ("--tensor", "2", "--pipeline", "2"), 4, 10),
    "FSDP2, dcp": Example("train_torchtitan_style.py", (), 3, -1),
    "FSDP2, Checkpointer": Example("train_torchtitan_style.py", ("--checkpointer",), 3, 15),
    "HSDP, dcp": Example("train_torchtitan_style.py", ("--replicas", "2"), 4, -1),
    "HSDP, Checkpointer": Example("train_torchtitan_style.py", ("--checkpointer", "--replicas", "2"), 4, 15),
    "FSDP1": Example("train_fsdp1.py", (), 3, 10),
    "FSDP1, another wrapping": Example("train_fsdp1.py", ("--wrap", "linears"), 3, 10),
}


def run(path: Path, example: Example, *words: str) -> FrameworkRun:
    script = [str(ROOT / "examples" / example.script), "--steps", "24"]
    return FrameworkRun(path, example.ranks, [*script, *example.words, *words], python=Path(sys.executable))


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_end_has_the_bits_of_an_undisturbed_run(tmp_path: Path, name: str) -> None:
    """A rank is killed some steps after a save; a run is stopped, and goes on. Torch's dcp restores by itself."""
    whole, killed, stopped = (run(tmp_path / one, EXAMPLES[name]) for one in ("whole", "killed", "stopped"))
    whole.launch()
    killed.launch("13", "1", "kill")
    assert killed.restored() == [-1, EXAMPLES[name].restored]
    assert killed.end == whole.end
    stopped.stop_and_go_on(11)
    assert len(stopped.events("first_step")) >= 2
    assert stopped.end == whole.end


def train(path: Path, steps: int, *words: str) -> dict[str, torch.Tensor]:
    """Train up to a step under torchrun, from what is in the folder. Returns all tensors of that step, whole."""
    path.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    script = str(ROOT / "examples" / "train_megatron_style.py")
    done = subprocess.run(
        [*command, script, "--steps", str(steps), "--every", "6", "--micro-batches", "2", *words],
        cwd=path, env=scrubbed(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    target = path / f"{steps}.pt"
    export = [Path(sys.executable).with_name("resilio"), "ckpt", "export", "checkpoints", target, str(steps)]
    subprocess.run(export, cwd=path, env=scrubbed(), check=True, timeout=PATIENCE_S, capture_output=True)
    state = torch.load(target)
    moments = state["optimizer"]["tensors"]["fully_reshardable"]
    return state["model"] | {f"{name}.{key}": one for name, values in moments.items() for key, one in values.items()}


@pytest.mark.parametrize(("words", "same"), [(("--tensor", "2", "--pipeline", "2"), True), (("--tensor", "4"), False)])
def test_another_layout_trains_on(tmp_path: Path, words: tuple[str, ...], same: bool) -> None:
    """Two pipeline stages sum as two data-parallel ranks do; another tensor-parallel layout rounds otherwise."""
    undisturbed = train(tmp_path / "whole", 24, "--tensor", "2")
    half = train(tmp_path / "changed", 12, "--tensor", "2")
    end = train(tmp_path / "changed", 24, *words)
    assert end.keys() == undisturbed.keys() and len(end) == 4 * 3 * 4
    for name, value in end.items():
        assert not torch.equal(value, half[name]) or "norm" in name, name
        if same:
            assert torch.equal(value, undisturbed[name]), name
        else:
            assert torch.allclose(value.float(), undisturbed[name].float(), rtol=0.1, atol=0.02), name


def test_two_ranks_of_fsdp1_go_on_from_three_with_other_flat_parameters(tmp_path: Path) -> None:
    """What torch gathers of two is what it gathers of three, at once, and the wrapping makes no difference later."""

    def ended(checkpoints: str, ranks: int, steps: int, wrap: str) -> dict[str, Any]:
        path = tmp_path / f"{checkpoints}-{ranks}-{steps}"
        script = [str(SUPPORT / "frameworks" / "fsdp1_whole.py"), "whole.pt", str(ROOT / "examples" / "train_fsdp1.py")]
        where = ("--checkpoint-dir", str(tmp_path / checkpoints))
        run = FrameworkRun(
            path, ranks, [*script, "--steps", str(steps), "--wrap", wrap], is_watched=False,
            python=Path(sys.executable), options=where, PYTHONPATH=str(ROOT),
        )  # fmt: skip
        run.launch()
        found: dict[str, Any] = torch.load(path / "whole.pt")
        return found

    saved = ended("same", 3, 12, "blocks")
    shutil.copytree(tmp_path / "same", tmp_path / "other")
    restored = ended("other", 2, 12, "linears")
    torch.testing.assert_close(restored, saved, rtol=0, atol=0)
    same, other = ended("same", 2, 24, "blocks"), ended("other", 2, 24, "whole")
    torch.testing.assert_close(other, same, rtol=0, atol=0)
    assert not torch.equal(same["model"]["0.weight"], saved["model"]["0.weight"])
