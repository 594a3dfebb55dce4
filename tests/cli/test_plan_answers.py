"""When ``resilio plan`` cannot do what it is asked: the limit that stands in the way, and a change that helps.

What the answer names is tried: it must be so.
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from resilio_hpc.cli.main import main

LLAMA = ("llama2-7b", "--gpu", "h100", "--global-batch", "256")
MODULE = """
import torch
from torch import nn

class Steered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        {forward}

def example():
    return Steered(), torch.zeros(8, 4)
"""


def answer(capsys: pytest.CaptureFixture[str], *words: str, code: int) -> str:
    """The one line on standard error."""
    assert main(["plan", *words]) == code
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "Traceback" not in said.err, said
    return said.err


def works(capsys: pytest.CaptureFixture[str], *words: str) -> bool:
    code = main(["plan", *words])
    capsys.readouterr()
    return code == 0


# -- a model that cannot be traced -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "what", "instead"),
    [
        ("return self.layer(x) if x.sum() > 0 else x", "which way it goes depends on the values", "use torch.where"),
        ("return self.layer(x[torch.nonzero(x[:, 0])[:, 0]])", "shape depends on the values", "a fixed capacity"),
        ("return self.layer(x.reshape(7, 5))", "RuntimeError", "it must run with these inputs on the CPU"),
        ("return self.layr(x)", "AttributeError", "it must run with these inputs on the CPU"),
    ],
    ids=["branch", "shape", "inputs", "bug"],
)
def test_a_model_that_cannot_be_traced_is_told_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], forward: str, what: str, instead: str
) -> None:
    path = tmp_path / "it's mine.py"
    path.write_text(MODULE.format(forward=forward))
    said = answer(capsys, "model", "--module", f"{path}:example", code=2)
    assert "cannot be traced" in said and what in said and instead in said
    assert f"it's mine.py:11: {forward}"[:40] in said


def test_a_search_is_told_what_describes_a_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(MODULE.format(forward="return x"))
    said = answer(capsys, str(path), *LLAMA[1:], "--gpus", "8", code=2)
    assert "train.py" in said and ("config.json" in said or "preset" in said)


# -- batches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("--gpus", "12", "--per-node", "12", "--tp", "4", "--pp", "1", "--global-batch", "100"),
        ("--gpus", "64", "--tp", "1", "--pp", "1", "--global-batch", "63"),
        ("--gpus", "16", "--tp", "2", "--pp", "1", "--micro-batch", "3", "--global-batch", "256"),
    ],
)
def test_the_batches_and_gpus_that_are_named_as_nearest_are_possible(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    all_words = ("llama2-7b", "--gpu", "h200", *words)
    said = answer(capsys, *all_words, code=3)
    assert re.search(r"a global batch of \d+ cannot be split over the \d+ replicas that \d+ GPUs can hold", said)
    near = re.search(r"the nearest batches are (?:(\d+) and )?(\d+)", said)
    assert near is not None
    for batch in filter(None, near.groups()):
        assert works(capsys, *all_words[:-1], batch), batch
    gpus = re.search(r"the nearest number of GPUs is (\d+)", said)
    if gpus is not None:
        at = all_words.index("--gpus") + 1
        assert works(capsys, *all_words[:at], gpus[1], *all_words[at + 1 :])


@pytest.mark.parametrize(
    ("batch", "told"),
    [("0", "how many sequences"), ("-8", "how many sequences"), ("1.5", "1.5"), ("many", "many")],
)
def test_a_batch_that_is_no_number_of_sequences_is_told(
    batch: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in answer(capsys, *LLAMA[:-1], batch, "--gpus", "8", code=2)


# -- GPUs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "near"), [("h10", "H100"), ("A10O", "A100"), ("h20O", "H20"), ("b20", "B200")])
def test_an_unknown_gpu_is_told_the_nearest_names(
    name: str, near: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = f"unknown GPU '{name}': did you mean"
    said = answer(capsys, "llama2-7b", "--gpus", "8", "--gpu", name, "--global-batch", "8", code=2)
    assert told in said and near in said.partition("known are")[0]
    said = answer(capsys, "explain", "tp8", "--model", "llama2-7b", "--gpu", name, "--global-batch", "8", code=2)
    assert told in said
    (tmp_path / "rows.csv").write_text(f"layers,hidden,seq,gpu,num_gpus\n2,256,128,{name},1\n")
    assert main(["plan", "predict", f"--rows={tmp_path}/rows.csv", f"--out={tmp_path}/out.csv"]) == 1
    with (tmp_path / "out.csv").open(newline="") as stream:
        assert told in next(csv.DictReader(stream))["pred_note"]


def test_a_gpu_that_the_cluster_does_not_have_is_told_those_that_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.toml").write_text('[[pool]]\npartition = "p"\ngpu = "a100"\ngpus_per_node = 4\nnodes = 2\n')
    words = ("llama2-7b", "--global-batch", "64", "--inventory", f"{tmp_path}/c.toml")
    assert "no h100 there; the types are a100" in answer(capsys, *words, "--gpu", "h100", code=3)
    said = answer(capsys, *words, "--gpus", "16", code=3)
    assert "16 GPUs were asked for; partition p gives a job at most 8 (2 nodes x 4)" in said


# -- nothing fits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "change"),
    [
        (("--tp", "8", "--pp", "1", "--micro-batch", "16", "--recompute", "none"), "recompute"),
        (("--tp", "1", "--pp", "8", "--micro-batch", "32", "--recompute", "full", "--vpp", "1"), "micro-batch"),
        (("--tp", "1", "--pp", "1", "--zero", "0", "--micro-batch", "1", "--recompute", "full"), "tp"),
    ],
)
def test_one_limit_less_is_named_by_how_much_it_is_missed_and_it_helps(
    limits: tuple[str, ...], change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("llama2-7b", "--gpus", "8", "--gpu", "a100-40gb", "--global-batch", "64", *limits)
    said = answer(capsys, *words, code=3)
    assert re.search(r"needs [\d.]+ GB more per GPU than the [\d.]+ GB of A100-40GB", said)
    found = re.search(r"with --(\S+) (\S+) it would fit", said)
    assert found is not None and found[1] == change, said
    at = words.index(f"--{found[1]}") + 1
    assert works(capsys, *words[:at], found[2], *words[at + 1 :])


def test_the_smallest_number_of_gpus_that_is_named_is_the_smallest(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("llama2-70b", "--gpu", "a100", "--global-batch", "512", "--offload", "none", "--gpus")
    found = re.search(r"the smallest number of GPUs that fits is (\d+)", answer(capsys, *words, "16", code=3))
    assert found is not None
    assert works(capsys, *words, found[1])
    assert "GB more per GPU" in answer(capsys, *words, str(int(found[1]) - 8), code=3)


def test_what_lies_in_the_host_s_memory_is_the_way_out_and_the_reasons_speak_of_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("plan", "llama2-70b", "--gpus", "16", "--gpu", "a100", "--global-batch", "512")
    assert "with --offload both it would fit" in answer(capsys, *words[1:], "--offload", "none", code=3)
    for more in ((), ("--offload", "both"), ("--offload", "any")):
        assert main([*words, *more, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        best = found["choices"][0]
        assert best["degrees"]["offload"] == "both" and best["environment"]["RESILIO_OFFLOAD"] == "both"
        assert found["rejected_candidates"] and best["memory_bytes"] < best["gpu_bytes"]
    assert main([*words, "--emit", "megatron"]) == 0
    assert "--optimizer-cpu-offload" in capsys.readouterr().out


def test_a_gpu_with_more_memory_is_named_where_it_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("llama2-7b", "--gpus", "1", "--global-batch", "8", "--gpu")
    found = re.search(r"so would (\S+) \(|(\S+) \(\d+ GB each\) would do", answer(capsys, *words, "h100", code=3))
    assert found is not None
    assert works(capsys, *words, found[1] or found[2])


# -- what is taken without being given is said -------------------------------------------------------------------------


def test_a_node_has_the_usual_number_of_gpus_of_its_kind(capsys: pytest.CaptureFixture[str]) -> None:
    for gpu, nodes in (("gb200", 4), ("h100", 2)):
        assert main(["plan", "llama3-8b", "--gpus", "16", "--gpu", gpu, "--global-batch", "64", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["choices"][0]["nodes"] == nodes


def test_a_length_that_comes_from_a_file_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
              "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 131072}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["plan", str(tmp_path), "--gpus", "64", "--gpu", "h200", "--global-batch", "64", "--json"]
    assert main(words) == 0
    assert "sequences of 131,072 tokens are assumed, the longest of" in capsys.readouterr().err
    assert main([*words, "--seq", "4096"]) == 0
    assert capsys.readouterr().err == ""


def test_a_gpu_without_bf16_gets_fp16_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "gpt2-xl", "--gpus", "8", "--gpu", "v100", "--global-batch", "64", "--emit", "megatron"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "V100 has no bf16: fp16 is assumed" in said.err and "--fp16" in said.out and "--bf16" not in said.out
    assert main([*words, "--precision", "bf16"]) == 2
    assert "v100 has no products of bf16" in capsys.readouterr().err
