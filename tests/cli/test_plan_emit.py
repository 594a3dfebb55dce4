"""``--emit megatron`` and ``torchtitan``: whole commands, with options that these frameworks have."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest

from resilio_hpc.autoparallel.base.layout import Layout, parse_layout
from resilio_hpc.autoparallel.cost.stage_times import layers_of
from resilio_hpc.autoparallel.model.megatron_arguments import from_megatron
from resilio_hpc.autoparallel.model.model_description import uniform
from resilio_hpc.autoparallel.model.presets import preset
from resilio_hpc.autoparallel.search.frameworks import machine_and_stack, space_of
from resilio_hpc.autoparallel.search.search import search
from resilio_hpc.cli.main import main
from resilio_hpc.cli.plan.emit import deepspeed, megatron, pipeline_layout, torchtitan
from resilio_hpc.cli.plan.model_flags import model_flags, precision_flags
from resilio_hpc.core.errors import UsageError

# of NVIDIA/Megatron-LM megatron/training/arguments.py @307dcf37, those that a layout or a model may need
MEGATRON = """
    account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split add-qkv-bias bf16
    context-parallel-size disable-bias-linear expert-model-parallel-size expert-tensor-parallel-size ffn-hidden-size
    fine-grained-activation-offloading
    fp16 fp4-format fp4-recipe fp8-format fp8-recipe global-batch-size group-query-attention hidden-size kv-channels
    kv-lora-rank max-position-embeddings micro-batch-size
    microbatch-group-size-per-virtual-pipeline-stage moe-ffn-hidden-size moe-grouped-gemm moe-layer-freq
    moe-router-enable-expert-bias moe-router-score-function moe-router-topk moe-shared-expert-gate
    moe-shared-expert-intermediate-size
    moe-token-dispatcher-type multi-latent-attention normalization num-attention-heads num-experts num-layers
    num-query-groups num-virtual-stages-per-pipeline-rank offload-modules optimizer-cpu-offload
    optimizer-offload-fraction overlap-cpu-optimizer-d2h-h2d overlap-grad-reduce overlap-param-gather
    pipeline-model-parallel-layout pipeline-model-parallel-size position-embedding-type q-lora-rank qk-head-dim
    qk-layernorm qk-pos-emb-head-dim recompute-granularity recompute-method recompute-num-layers seq-length
    sequence-parallel swiglu tensor-model-parallel-size tokenizer-type tp-comm-overlap
    untie-embeddings-and-output-weights use-distributed-optimizer use-precision-aware-optimizer
    v-head-dim vocab-size
"""
# of torchtitan 0.3.0 (PyPI), torchtitan/config/configs.py, manager.py and distributed/activation_checkpoint.py; its own
# parser reads whole commands in tests/frameworks/test_emitted_options.py
TORCHTITAN = """
    module config activation-checkpoint:full activation-checkpoint:none activation-checkpoint:selective
    parallelism.context_parallel_degree parallelism.data_parallel_replicate_degree
    parallelism.data_parallel_shard_degree parallelism.expert_parallel_degree parallelism.fsdp_reshard_after_forward
    parallelism.pipeline_parallel_degree parallelism.pipeline_parallel_first_stage_less_layers
    parallelism.pipeline_parallel_last_stage_less_layers parallelism.pipeline_parallel_layers_per_stage
    parallelism.pipeline_parallel_microbatch_size parallelism.pipeline_parallel_schedule
    parallelism.tensor_parallel_degree training.disable_cuda_graphs training.enable_cpu_offload
    training.global_batch_size training.local_batch_size training.seq_len
"""
DESCRIBED = ("gpt3-175b", "llama2-70b", "llama3.2-1b", "mixtral-8x7b", "qwen2.5-7b", "qwen3-8b", "qwen3-30b-a3b",
             "qwen1.5-moe-a2.7b", "deepseek-v3", "deepseek-v2-lite", "phi4")  # fmt: skip


def names(words: list[str]) -> set[str]:
    return {word.removeprefix("--").partition("=")[0] for word in words}


@pytest.mark.parametrize("name", DESCRIBED)
def test_the_emitted_model_is_the_one_that_was_planned(name: str) -> None:
    model = preset(name)
    words = [*model_flags(model, uniform(model)), "--make-vocab-size-divisible-by=1", f"--seq-length={model.seq}"]
    again = from_megatron(words)
    assert again.flops_per_token(1024) == model.flops_per_token(1024)
    # Megatron has a bias of the router, and of attention's result, where Hugging Face's model has none
    assert again.parameters == pytest.approx(model.parameters, rel=1e-4)


@pytest.mark.parametrize("name", ["bloom-7b1", "gpt-neox-20b", "gemma2-9b"])
def test_a_model_that_arguments_do_not_describe_is_said(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", name, "--gpus", "16", "--gpu", "h100", "--global-batch", "64", "--emit", "megatron")
    assert main(list(words)) == 2
    assert "do not describe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("llama3-405b", ("--gpus", "1024", "--seq", "8192")),
        ("deepseek-v3", ("--gpus", "1024", "--precision", "fp8", "--recompute", "full")),
        ("llama3-8b", ("--gpus", "16", "--precision", "fp8", "--seq", "131072")),
    ],
)
def test_every_emitted_option_is_one_of_the_framework_s(
    model: str, more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("plan", model, "--gpu", "h100", "--global-batch", "1024", *more)
    assert main([*common, "--emit", "megatron"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert names(words) - set(MEGATRON.split()) == set() and len(words) == len(names(words))
    assert {"num-layers", "vocab-size", "micro-batch-size", "bf16"} <= names(words)
    if "--recompute" not in more and "--precision" not in more:
        assert main([*common, "--framework", "torchtitan", "--emit", "torchtitan"]) == 0
        assert names(shlex.split(capsys.readouterr().out)) - set(TORCHTITAN.split()) == set()


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "head"),
    [(61, 16, 2, 0), (61, 8, 4, 0), (126, 16, 1, 0), (70, 12, 1, 0), (94, 8, 4, 0), (32, 8, 1, 2), (30, 4, 4, 2)],
)
def test_megatron_gets_the_stages_that_were_costed(layers: int, pp: int, vpp: int, head: int) -> None:
    chunks = pipeline_layout(Layout(pp=pp, vpp=vpp, head_layers=head), layers).split("|")
    held = [chunk.count("t") for chunk in chunks]
    assert chunks[0].startswith("E") and chunks[-1].endswith("L") and len(chunks) == pp * vpp
    assert [sum(held[stage::pp]) for stage in range(pp)] == layers_of(layers, pp, head)


def test_ends_that_count_as_layers_are_told_to_megatron() -> None:
    words = megatron(parse_layout("tp8-pp16-dp1-mb1-vpp8-sp", 16), uniform(preset("llama3-405b")))
    assert "--account-for-embedding-in-pipeline-split" in words and "--account-for-loss-in-pipeline-split" in words
    assert "--num-virtual-stages-per-pipeline-rank=8" in words


def test_rounds_longer_than_the_pipeline_are_told_to_megatron() -> None:
    model, group = uniform(preset("llama3-70b")), "--microbatch-group-size-per-virtual-pipeline-stage"
    assert f"{group}=6" in megatron(parse_layout("tp8-pp4-dp1-mb1-vpp5-sp", 6), model)
    assert not any(group in word for word in megatron(parse_layout("tp8-pp4-dp1-mb1-vpp5-sp", 8), model))
    with pytest.raises(UsageError, match="does not run"):
        megatron(parse_layout("tp8-pp4-dp1-mb1-vpp5-sp", 3), model)


@pytest.mark.parametrize(
    ("precision", "words"),
    [("", ["--bf16"]), ("fp16", ["--fp16"]), ("fp32", []),
     ("mxfp8", ["--bf16", "--fp8-format=hybrid", "--fp8-recipe=mxfp8"]),
     ("nvfp4", ["--bf16", "--fp4-format=e2m1", "--fp4-recipe=nvfp4"])],
)  # fmt: skip
def test_a_precision_is_told_to_megatron(precision: str, words: list[str]) -> None:
    assert precision_flags(precision) == words


@pytest.mark.parametrize(
    ("layers", "layout", "stages"),
    [
        (128, "pp8-dp2-mb1-vpp4-fsdp", (0, 0, 4)),
        (126, "pp16-dp2-mb1-vpp8-fsdp", (1, 1, 1)),
        (127, "pp16-dp2-mb1-fsdp", (0, 1, 8)),
        (61, "pp16-dp2-mb1-fsdp", None),
        (30, "pp8-dp2-mb1-head2-fsdp", (0, 2, 4)),
        (32, "pp8-dp2-mb1-head2-fsdp", (0, 2)),
    ],
)
def test_torchtitan_gets_the_stages_that_were_costed(layers: int, layout: str, stages: tuple[int, ...] | None) -> None:
    model = replace(uniform(preset("llama3-8b")), layers=layers)
    words = torchtitan(parse_layout(layout, 64), model)
    named = ("first_stage_less_layers", "last_stage_less_layers", "layers_per_stage")
    found = [int(word.rpartition("=")[2]) for name in named for word in words if name in word]
    assert tuple(found) == (stages or ())


def test_a_precision_that_is_part_of_torchtitans_config() -> None:
    model = uniform(preset("llama3-8b"))
    layout = parse_layout("dp8-mb1-fsdp", 64)
    assert "--config=llama3_8b_mxfp8" in torchtitan(layout, model, "mxfp8")
    assert not names(torchtitan(layout, replace(model, name="my-model"))) & {"module", "config"}
    with pytest.raises(UsageError, match="fp8 is part of a --config"):
        torchtitan(layout, model, "fp8")


def test_deepspeed_gets_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "llama2-7b", "--gpus", "16", "--gpu", "a100", "--global-batch", "128", "--framework", "DeepSpeed")
    assert main([*words, "--pp", "2", "--tp", "1", "--emit", "deepspeed"]) == 0
    found = json.loads(capsys.readouterr().out)
    batch = found["train_micro_batch_size_per_gpu"] * found["gradient_accumulation_steps"] * 8
    assert batch == found["train_batch_size"] == 128
    assert found["pipeline"]["stages"] == 2 and found["bf16"]["enabled"]
    assert set(found) <= {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
                          "zero_optimization", "bf16", "pipeline"}  # fmt: skip


@pytest.mark.parametrize(("text", "precision"), [("pp2-vpp2-dp4-mb1", ""), ("cp2-dp4-mb1", ""), ("dp8-mb1", "fp8")])
def test_what_deepspeed_has_not_is_said(text: str, precision: str) -> None:
    with pytest.raises(UsageError, match=r"DeepSpeed does not run|has no fp8"):
        deepspeed(parse_layout(text, 64), precision)


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "mixtral-8x7b", "deepseek-v2-lite"])
@pytest.mark.parametrize(("gpu", "gpus", "batch"), [("h200", 8, 24), ("b200", 96, 288), ("gb200", 256, 4096)])
@pytest.mark.parametrize("framework", ["Megatron-Core", "torchtitan", "DeepSpeed"])
def test_every_layout_of_the_ranking_can_be_emitted(framework: str, gpu: str, gpus: int, batch: int, name: str) -> None:
    model = uniform(preset(name), 8192)
    machine, stack = machine_and_stack(gpu, 0, framework)
    found = search(model, machine, gpus, batch, stack, space_of(framework), headroom=0.05)
    every = found.layouts.full(len(found.layouts))
    for row in range(0, found.cost.iteration.size, max(1, found.cost.iteration.size // 200)):
        layout = every.row(row)
        if framework == "DeepSpeed":
            deepspeed(layout)
        else:
            (megatron if framework == "Megatron-Core" else torchtitan)(layout, model)
