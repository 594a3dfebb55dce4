"""``resilio plan model``: what it prints, and what a mistake is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resilio_hpc.cli.main import main

MODULE = """
import torch

def example():
    layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(4)]
    return torch.nn.Sequential(*layers), torch.zeros(8, 64)

def number():
    return 7
"""


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    return said.err


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 0
    return capsys.readouterr().out


def test_a_preset_into_stages(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, "model", "gpt3-175b", "--stages", "8", "--band", "0.05")
    assert "174,604,259,328 parameters" in said and "1.08 TFLOPs per token" in said
    assert "h.84 norm" in said and "50.3 MB" in said and "embedding (0, 7)" in said


def test_json_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    about = json.loads(printed(capsys, "model", "llama3-8b", "--stages", "4", "--json", "--seq", "4096"))
    assert about["parameters"] == 8_030_261_248
    assert sum(stage["flops"] for stage in about["stages"]) == about["total_flops"] == 4096 * about["flops_per_token"]
    assert {stage["input_bytes"] for stage in about["stages"][1:]} == {4096 * 4096 * 2}


def test_a_module_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "it's a model.py"
    path.write_text(MODULE)
    about = json.loads(
        printed(capsys, "model", "--module", f"{path}:example", "--stages", "4", "--band", "0.3", "--json")
    )
    assert about["parameters"] == 4 * 64 * 64
    assert [stage["parameters"] for stage in about["stages"]] == [64 * 64] * 4
    assert "must return (module, inputs)" in told(capsys, "model", "--module", f"{path}:number")
    assert "has no function other" in told(capsys, "model", "--module", f"{path}:other")
    path.write_text("import nothing_of_this_name")
    assert "ModuleNotFoundError" in told(capsys, "model", "--module", f"{path}:example")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["modl"], "did you mean model?"),
        (["model"], "one of MODEL, --megatron and --module"),
        (["model", "gpt2", "--megatron", "--num-layers 2"], "one of MODEL"),
        (["model", "gpt3-176b"], "did you mean gpt3-175b"),
        (["model", "gpt2", "--stages", "0"], "at least 1"),
        (["model", "gpt2", "--stages", "1000"], "can be cut into"),
        (["model", "gpt2", "--stages", "8"], "'head' alone has"),
        (["model", "llama2-70b", "--stages", "7", "--band", "0"], "nearest is --band"),
        (["model", "gpt2", "--seq", "-1"], "--seq -1"),
        (["model", "gpt2", "--micro-batch", "0"], "micro-batch of 0"),
        (["model", "--megatron", "'"], "No closing quotation"),
        (["model", "--module", "train.py"], "it is FILE.py:NAME"),
        (["model", "--module", "nowhere.py:f"], "no file nowhere.py"),
    ],
)
def test_a_mistake_is_told_in_a_line(words: list[str], answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer in told(capsys, *words)


def test_the_band_that_is_named_as_nearest_can_be_kept(capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, "model", "llama3-8b", "--stages", "16", "--band", "0.01")
    near = said.partition("nearest is --band ")[2].split()[0].strip(",")
    assert "16 stages" in printed(capsys, "model", "llama3-8b", "--stages", "16", "--band", near)


def test_the_presets_are_listed_with_their_source(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, "model", "--list")
    assert "opt-6.7b" in said and "6,658,473,984" in said and "arXiv:2205.01068" in said
