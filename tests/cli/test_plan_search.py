"""``resilio plan MODEL`` and ``resilio plan explain``: what they print, emit and refuse."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.cli.main import main

SMALL = ("llama2-7b", "--gpus", "16", "--gpu", "h100", "--global-batch", "256")
INVENTORY = """
[[pool]]
partition = "big"
gpu = "h100"
gpus_per_node = 8
nodes = 6
idle = 2

[[pool]]
partition = "old"
gpu = "a100"
gpus_per_node = 4
nodes = 8
preemptible = true

[[pool]]
partition = "odd"
gpu = "unheard-of"
gpus_per_node = 4
nodes = 8
"""


def run(capsys: pytest.CaptureFixture[str], *words: str, expect: int = 0) -> tuple[str, str]:
    assert main(["plan", *words]) == expect
    said = capsys.readouterr()
    return said.out, said.err


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    return json.loads(run(capsys, *words, "--json")[0])  # type: ignore[no-any-return]


def test_the_table_has_the_best_layout_and_why_others_lost(capsys: pytest.CaptureFixture[str]) -> None:
    best = answer(capsys, *SMALL)["choices"][0]
    said, _ = run(capsys, *SMALL)
    assert best["layout"].removesuffix("-recompute-none") in said and "2 x 8" in said and "/79" in said
    assert (
        f"{best['mfu']:.1%}" in said and f"{best['tokens_s']:,.0f}" in said and f"{best['flops_s'] / 1e12:.0f}" in said
    )
    assert "masked keys counted" in said and "of 989 TFLOP/s" in said and "5% stay free" in said
    assert "do not fit" in said and "is too large by" in said and "slower: more" in said


def test_search_is_the_same_word(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = answer(capsys, *SMALL), answer(capsys, "search", *SMALL)
    assert first["choices"] == second["choices"] and first["layouts_looked_at"] > 100
    assert first["choices"][0]["low_s"] < first["choices"][0]["iteration_s"] < first["choices"][0]["high_s"]


def test_an_inventory_file_gives_shapes_of_all_partitions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "it's a cluster.toml"
    path.write_text(INVENTORY)
    words = ("llama2-7b", "--inventory", str(path), "--global-batch", "256")
    out, err = run(capsys, *words, "--gpus", "32", "--json")
    found = {(one["partition"], one["nodes"], one["gpus_per_node"], one["start"]) for one in json.loads(out)["choices"]}
    assert ("big", 4, 8, "ever") in found and ("old", 8, 4, "now") in found
    assert "partition odd is left out: unknown GPU 'unheard-of'" in err
    old = answer(capsys, *words, "--partition", "old", "--gpus", "16-32")
    assert {one["nodes"] for one in old["choices"]} <= {4, 5, 6, 7, 8} and old["choices"][0]["marks"] == ["preemptible"]
    assert old["choices"][0]["sbatch"] == {"nodes": "8", "gpus_per_node": "a100:4", "partition": "old"}


def test_finishing_time_counts_failures_and_never_ends_where_they_come_too_fast(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (*SMALL, "--rank", "finish", "--steps", "1000")
    plain, failing = (answer(capsys, *words, *more)["choices"][0] for more in ((), ("--mtbf", "100")))
    assert plain["run_s"] == pytest.approx(1000 * plain["iteration_s"], rel=1e-4) and failing["run_s"] > plain["run_s"]
    tokens = answer(capsys, *SMALL, "--tokens", "1048576000")["choices"][0]
    assert tokens["run_s"] == pytest.approx(plain["run_s"])
    assert answer(capsys, *words, "--mtbf", "0.001")["choices"][0]["run_s"] is None
    assert "never" in run(capsys, *words, "--mtbf", "0.001")[0]


def test_the_paper_s_planner_has_its_own_times(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "llama2-7b",
        "--gpus",
        "16",
        "--gpu",
        "h100",
        "--global-batch",
        "256",
        "--recompute",
        "full",
        "--zero",
        "1",
    )
    found = answer(capsys, *words, "--cost", "paper")["choices"]
    assert found[0]["degrees"]["pp"] == found[0]["nodes"] and "formula (3)" in run(capsys, *words, "--cost", "paper")[0]


# -- emit --------------------------------------------------------------------------------------------------------------


def test_emitted_arguments_have_the_chosen_degrees(capsys: pytest.CaptureFixture[str]) -> None:
    pins = ("--tp", "4", "--pp", "2", "--recompute", "full", "--micro-batch", "1")
    sharded = (*SMALL, *pins, "--framework", "torchtitan", "--zero", "3", "--emit", "torchtitan")
    env = run(capsys, *SMALL, *pins, "--emit", "env")[0]
    assert (
        "export RESILIO_TP=4\n" in env and "export RESILIO_DP=2\n" in env and "export RESILIO_RECOMPUTE=full\n" in env
    )
    megatron = run(capsys, *SMALL, *pins, "--zero", "1", "--emit", "megatron")[0].split()
    assert {"--tensor-model-parallel-size=4", "--pipeline-model-parallel-size=2", "--micro-batch-size=1",
            "--global-batch-size=256", "--recompute-granularity=full", "--seq-length=4096",
            "--use-distributed-optimizer"} <= set(megatron)  # fmt: skip
    titan = run(capsys, *sharded)[0].split()
    assert {"--parallelism.tensor_parallel_degree=4", "--parallelism.pipeline_parallel_degree=2",
            "--parallelism.data_parallel_shard_degree=2", "--parallelism.fsdp_reshard_after_forward=never",
            "activation-checkpoint:full"} <= set(titan)  # fmt: skip


def test_a_framework_that_cannot_run_the_layout_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    _, said = run(capsys, *SMALL, "--framework", "torchtitan", "--emit", "megatron", expect=2)
    assert "for layouts of its own" in said and "--framework Megatron-Core" in said


def test_the_job_script_leaves_to_the_launcher_what_a_resize_changes(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "--tp", "2", "--pp", "1", "--micro-batch", "1", "--emit", "sbatch", "--")
    said, _ = run(capsys, *words, "train.py", "--tp", "{tp}", "--mb={micro_batch}", '{"a": 1}', "it's")
    assert "#SBATCH --nodes=2\n" in said and "#SBATCH --gpus-per-node=8\n" in said
    assert "--layout tp=2,pp=1 --fill-arguments train.py --tp '{tp}' --mb=1 '{\"a\": 1}'" in said
    assert "export RESILIO_MICRO_BATCH=1\n" in said
    assert "--fill-arguments" not in run(capsys, *words, "train.py")[0]
    _, wrong = run(capsys, *words, "train.py", "{tp}", "{tensor}", expect=2)
    assert "there is no {tensor}" in wrong
    assert "behind --" in run(capsys, *SMALL, "--emit", "sbatch", expect=2)[1]


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ((*SMALL[:4], "h1000", *SMALL[5:]), 2, "unknown GPU 'h1000': did you mean H100"),
        ((*SMALL[:-1], "7", "--tp", "2", "--pp", "1"), 3, "the nearest batches are"),
        ((*SMALL, "--tp", "3"), 3, "tp 3 does not divide 32 attention heads"),
        (("llama3-405b", *SMALL[1:]), 3, "the smallest number of GPUs that fits is"),
        ((*SMALL, "--tp", "1", "--zero", "0", "--pp", "1", "--recompute", "none"), 3, "GB more per GPU"),
        ((*SMALL, "--framework", "fsdp", "--tp", "2"), 2, "FSDP has tp = 1 alone"),
        ((*SMALL, "--framework", "any", "--tp", "4", "--pp", "2", "--zero", "2"), 3, "do not go with a pipeline"),
        (SMALL[:-2], 2, "--global-batch …"),
        ((*SMALL, "--seq", "-4"), 2, "--seq -4"),
        ((*SMALL, "--zero", "3"), 2, "Megatron-Core has stages 0, 1 here"),
        ((*SMALL, "--framework", "torchtitan", "--offload", "both"), 2, "torchtitan has none, optimizer here"),
        ((*SMALL, "--mtbf", "-3"), 2, "--mtbf -3"),
        ((*SMALL, "--steps", "3", "--tokens", "7"), 2, "one of --steps and --tokens"),
        ((*SMALL, "--restart-s", "inf"), 2, "--restart-s inf"),
        ((*SMALL, "--gpus", "8-4"), 2, "the smaller number first"),
        ((*SMALL, "--gpus", "many"), 2, "neither a number nor a range"),
        ((*SMALL, "--per-node", "0"), 2, "--per-node 0"),
        ((*SMALL, "--cp", "0"), 2, "--cp 0"),
        ((*SMALL, "--", "train.py"), 2, "a command is for --emit sbatch"),
        (("llama2-7b", "--gpu", "h100", "--global-batch", "8"), 2, "--gpus N: how many?"),
        (("llama2-7b", "--inventory", "nowhere.toml", "--global-batch", "8"), 2, "nowhere.toml"),
        (("--gpus", "8", "--gpu", "h100", "--global-batch", "8"), 2, "one of MODEL, --megatron and --module"),
        (("llama2-7", "--gpus", "8"), 2, "did you mean llama2-7"),
        ((*SMALL, "--cost", "paper", "--recompute", "none"), 3, "no layout of algorithm 1 fits"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_a_line(
    words: tuple[str, ...], code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = run(capsys, *words, expect=code)
    assert out == "" and err.count("\n") == 1 and told in err, err


# -- explain -----------------------------------------------------------------------------------------------------------

LAYOUT = ("explain", "tp4-pp2-dp2-mb1-vpp2-sp-zero1-recompute-full", "--model", "llama2-7b", "--gpu", "h100",
          "--global-batch", "64")  # fmt: skip


def test_explain_prints_the_pipeline_and_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, page = tmp_path / "a.svg", tmp_path / "a.html"
    said, _ = run(capsys, *LAYOUT, "--svg", str(picture), "--html", str(page))
    assert "  0 0" in said and "tensor parallel traffic" in said and "activations" in said
    ET.parse(picture)
    assert "<svg" in page.read_text()
    about = json.loads(run(capsys, *LAYOUT, "--json")[0])
    assert len(about["stages"]) == 2 and about["parts_s"]["compute"] > 0


def test_what_explain_says_is_what_the_search_said(capsys: pytest.CaptureFixture[str]) -> None:
    best = answer(capsys, *SMALL)["choices"][0]
    about = json.loads(run(capsys, "explain", best["layout"], "--model", "llama2-7b", "--gpu", "h100", "--global-batch",
                           "256", "--json")[0])  # fmt: skip
    assert about["iteration_s"] == pytest.approx(best["iteration_s"], rel=1e-5)
    assert max(stage["total"] for stage in about["stages"]) == pytest.approx(best["memory_bytes"], rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "code", "told"),
    [
        ({1: "tp4-what"}, 2, "'what' is no part"),
        ({1: "tp5"}, 2, "tp 5 does not divide"),
        ({5: "h"}, 2, "unknown GPU"),
        ({7: "63"}, 2, "cannot be split"),
        ({3: "llama3-405b", 1: "tp2-pp1-dp8-mb1"}, 3, ""),
    ],
)
def test_a_layout_that_cannot_be_is_told(
    changes: dict[int, str], code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [changes.get(place, word) for place, word in enumerate(LAYOUT)]
    out, err = run(capsys, *words, expect=code)
    assert told in err and (code == 2 or "too large" in out)
