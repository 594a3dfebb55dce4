"""``resilio plan FILE.py:NAME`` for modules that are no decoders of equal layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resilio_hpc.cli.main import main

torch = pytest.importorskip("torch")

from torch.distributed.pipelining import SplitPoint, pipeline  # noqa: E402

from tests.support.torch_modules import Widening  # noqa: E402

FILE = """
import torch
from tests.support.torch_modules import skipping, widening

def equal():
    layer = torch.nn.TransformerEncoderLayer(64, 4)
    return torch.nn.Linear(4, 4), ()

def uncounted():
    class Inverse(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one = torch.nn.Linear(8, 8)
        def forward(self, x):
            return torch.linalg.inv(self.one(x)).sum()
    return Inverse(), (torch.zeros(2, 8, 8),)
"""
ASKED = ("--gpus", "16", "--gpu", "h100", "--global-batch", "64")


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my_train.py"
    path.write_text(FILE)
    return str(path)


def planned(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    assert main(["plan", *words]) == code
    told = capsys.readouterr()
    return told.out, told.err


def test_the_ranking_says_what_it_is_of(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = planned(capsys, f"{file}:widening", *ASKED, "--pp", "4")
    assert f"{file}:widening is no decoder of equal layers" in err and "costed by its operators" in err
    assert "Widening on 2 x 8 H100: " in out and "a batch of 64 x 64 tokens" in out
    assert "traced operators, for PyTorch" in out and "\ntp1-pp4-dp4-" in out
    assert "after the first begin with layers." in out and "(RESILIO_STAGES)" in out


def test_images_count_as_samples_and_fp32_is_said(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = planned(capsys, f"{file}:skipping", *ASKED)
    assert "a batch of 64 samples, which tok/s counts" in out and "Its parameters are fp32" in out
    out, _ = planned(capsys, f"{file}:uncounted", *ASKED)
    assert "no formula of FLOPs is known: linalg_inv" in " ".join(out.split())


def test_for_programs(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(planned(capsys, f"{file}:widening", *ASKED, "--pp", "4", "--json")[0])
    best = found["choices"][0]
    assert (found["cost"], found["seq"], found["model"]) == ("operators", 64, "Widening")
    assert best["degrees"]["pp"] == 4 and len(best["stages"]) == 3
    assert best["environment"]["RESILIO_STAGES"] == ",".join(best["stages"])
    assert best["low_s"] < best["iteration_s"] < best["high_s"] and best["memory_bytes"] < best["gpu_bytes"]
    assert found["layouts_looked_at"] > 10 and found["pareto"] and found["best_of_first_shape"]


def test_a_layout_without_stages_leaves_no_names_of_another_one(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = planned(capsys, f"{file}:widening", *ASKED, "--pp", "1", "--emit", "env")
    assert "export RESILIO_STAGES=\n" in out


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch itself
def test_torch_cuts_the_module_where_the_stages_begin(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = planned(capsys, f"{file}:widening", *ASKED, "--pp", "4", "--emit", "env")
    lines = dict(line.removeprefix("export ").split("=", 1) for line in out.splitlines())
    assert lines["RESILIO_PP"] == "4"
    split = dict.fromkeys(lines["RESILIO_STAGES"].split(","), SplitPoint.BEGINNING)
    cut = pipeline(Widening(), mb_args=(torch.zeros(1, 16, dtype=torch.long),), split_spec=split)
    assert cut.num_stages == 4


def test_a_job_script_has_the_stages(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (f"{file}:widening", *ASKED, "--pp", "2", "--emit", "sbatch", "--", "train.py", "--micro", "{micro_batch}")
    out, _ = planned(capsys, *words)
    assert "export RESILIO_STAGES=layers." in out and "--layout tp=1,pp=2" in out


def test_several_shapes_and_costs_of_failures(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (f"{file}:widening", "--gpus", "1-16", "--gpu", "a100", "--global-batch", "64", "--rank", "gpu-hours")
    out, _ = planned(capsys, *words, "--mtbf", "1000", "--steps", "100000")
    assert "GPU-hours" in out and "1 x 8" in out
    out, _ = planned(capsys, *words, "--pareto")
    assert "that no other beats" in out


def test_a_decoder_can_be_costed_by_its_operators_too(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(planned(capsys, f"{file}:widening", *ASKED, "--cost", "operators", "--json")[0])
    assert found["cost"] == "operators"


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("--tp 2", 2, "--tp 2: a module costed by its operators has tp = 1; "),
        ("--vpp 2", 2, "--vpp 2: "),
        ("--cp 4", 2, "--cp 4: "),
        ("--seq 4096", 2, "has the length of its inputs"),
        ("--offload both", 2, "keeps everything on the GPUs"),
        ("--recompute selective", 2, "has none and full"),
        ("--emit megatron", 2, "has env and sbatch"),
        ("--zero 2 --framework Megatron-Core", 2, "--zero 2: Megatron-Core has stages 0, 1"),
        ("--framework asdf", 2, "'asdf' is not known"),
        ("--pp 16", 3, "no layout divides the GPUs and 64 samples; it has 10 stages at most"),
        ("--cost paper", 2, "is no decoder of equal layers"),
    ],
)
def test_what_such_a_module_does_not_have(
    file: str, capsys: pytest.CaptureFixture[str], words: str, code: int, told: str
) -> None:
    _, err = planned(capsys, f"{file}:widening", *ASKED, *words.split(), code=code)
    assert told in err and err.rstrip().splitlines()[-1].startswith("resilio: ") and "Traceback" not in err


def test_other_mistakes_are_one_line(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = planned(capsys, "llama3-8b", *ASKED, "--cost", "operators", code=2)
    assert "is for a torch module: FILE.py:NAME" in err
    _, err = planned(capsys, f"{file}:equal", *ASKED, "--cost", "operators", code=2)
    assert "Traceback" not in err and err.count("\n") == 1


def test_nothing_fits_and_how_much_is_missing(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    large = "torch.nn.Sequential(*(torch.nn.Linear(65536, 65536) for _ in range(2))), (torch.zeros(1, 65536),)"
    Path(file).write_text(f"{FILE}\ndef large():\n    return {large}\n")
    _, err = planned(capsys, f"{file}:large", "--gpus", "1", "--gpu", "a100-40gb", "--global-batch", "64", code=3)
    assert "nothing fits; of " in err and " GB per GPU: more GPUs" in err
