"""A choice in the form of a job or a training framework: ``--emit env|megatron|torchtitan|deepspeed|sbatch``."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from resilio_hpc.autoparallel.base.layout import Layout, Offload, Recompute, Schedule
from resilio_hpc.autoparallel.cost.stage_times import layers_of
from resilio_hpc.autoparallel.model.model_description import TransformerModel
from resilio_hpc.autoparallel.model.transformer import Transformer
from resilio_hpc.autoparallel.search.choice import Choice
from resilio_hpc.cli.plan.job import JobOf
from resilio_hpc.cli.plan.model_flags import model_flags, precision_flags
from resilio_hpc.core.errors import UsageError
from resilio_hpc.slurm.submit import template_files

KINDS = ("env", "megatron", "torchtitan", "deepspeed", "sbatch")
OF_FRAMEWORK = {"megatron": ("Megatron", "NeMo"), "torchtitan": ("torchtitan",), "deepspeed": ("DeepSpeed",)}
"""For which names of software, by their beginning, each kind is."""


@dataclass(frozen=True)
class Emitted:
    """What is emitted: the model as it is costed and as it is described, the layout's precision, the command."""

    model: Transformer
    description: TransformerModel
    precision: str
    command: Sequence[str] = ()


def check(kind: str | None, framework: str) -> None:
    """Raise UsageError where the layouts of this framework are not what is to be emitted."""
    names = OF_FRAMEWORK.get(kind or "", ())
    if names and not framework.startswith(names):
        wanted = {"megatron": "Megatron-Core", "deepspeed": "DeepSpeed"}.get(kind or "", kind)
        raise UsageError(f"--emit {kind} is for layouts of its own: plan with --framework {wanted}, not {framework}")


def emit(kind: str, choice: Choice, asked: Emitted) -> str:
    """Return the text with its line end. Raises UsageError where the framework cannot run the layout."""
    if kind in ("env", "sbatch"):
        return emit_job(kind, choice, asked.command)
    if kind == "megatron":
        words = [*model_flags(asked.description, asked.model), *precision_flags(asked.precision)]
        return shlex.join([*words, *megatron(choice.layout, asked.model)]) + "\n"
    if kind == "deepspeed":
        return json.dumps(deepspeed(choice.layout, asked.precision), indent=1) + "\n"
    return shlex.join(torchtitan(choice.layout, asked.model, asked.precision)) + "\n"


def emit_job(kind: str, choice: Choice, command: Sequence[str]) -> str:
    """Return ``env`` or ``sbatch``, which need no description of the model. Raises UsageError."""
    exports = [f"export {name}={value}" for name, value in choice.environment().items()]
    if kind == "env":
        return "".join(f"{line}\n" for line in exports)
    if not command:
        raise UsageError("--emit sbatch: the training command goes behind --: … -- train.py --tensor-parallel {tp}")
    template = template_files.load("single-node" if choice.offer.shape.nodes == 1 else "multi-node")
    return JobOf(template, {}, tuple(command), os.environ).rendered(choice, exports)[0].script


# -- Megatron-LM -------------------------------------------------------------------------------------------------------


def megatron(layout: Layout, model: Transformer) -> list[str]:
    """Return arguments of Megatron-LM for a layout."""
    fewer = layout.vpp > 1 and layout.micro_batches < layout.pp
    other = layout.schedule != Schedule.ONE_F_ONE_B or layout.recompute == Recompute.ALTERNATE
    full = layout.offload >= Offload.ACTIVATIONS and layout.recompute == Recompute.FULL
    if layout.zero > 1 or other or fewer or full or (layout.offload % 2 and not layout.zero):
        raise UsageError(f"Megatron-LM does not run {layout}: plan with --framework Megatron-Core")
    words = [
        f"--tensor-model-parallel-size={layout.tp}",
        f"--pipeline-model-parallel-size={layout.pp}",
        f"--context-parallel-size={layout.cp}",
        f"--micro-batch-size={layout.micro_batch}",
        f"--global-batch-size={layout.global_batch}",
        f"--seq-length={model.seq}",
        *_stages(layout, model),
    ]
    if model.experts:
        words += [f"--expert-model-parallel-size={layout.ep}", "--moe-token-dispatcher-type=alltoall"]
        split = layout.etp or min(layout.tp, layout.num_gpus // layout.pp // layout.ep)
        words += [f"--expert-tensor-parallel-size={split}"]
    if layout.sequence_parallel:
        words += ["--sequence-parallel", "--tp-comm-overlap"]
    words += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"] * (layout.zero == 1)
    words += _offload(layout, model)
    if layout.recompute == Recompute.FULL:
        return [*words, "--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1"]
    return words + ["--recompute-granularity=selective"] * (layout.recompute == Recompute.SELECTIVE)


def _offload(layout: Layout, model: Transformer) -> list[str]:
    """Return what lies in the host's memory: optimizer, and the inputs of modules (``activations.movable``)."""
    words = []
    if layout.offload % 2:
        words += ["--optimizer-cpu-offload", "--optimizer-offload-fraction=1.0", "--overlap-cpu-optimizer-d2h-h2d"]
        words += ["--use-precision-aware-optimizer"]
    if layout.offload >= Offload.ACTIVATIONS:
        modules = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"]
        modules += ["expert_fc1", "moe_act"] * (model.experts > 0)
        words += ["--fine-grained-activation-offloading", "--offload-modules", *modules]
    return words


def _stages(layout: Layout, model: Transformer) -> list[str]:
    """Return how layers are spread over stages: evenly, with both ends counted as layers, or stage by stage."""
    parts = layout.pp * layout.vpp
    if layout.pp == 1:
        return []
    chunks = [f"--num-virtual-stages-per-pipeline-rank={layout.vpp}"] * (layout.vpp > 1)
    row = layout.micro_batches // layout.rounds
    if layout.vpp > 1 and row != layout.pp:
        chunks.append(f"--microbatch-group-size-per-virtual-pipeline-stage={row}")
    if layout.head_layers:
        return [*chunks, f"--pipeline-model-parallel-layout={pipeline_layout(layout, model.layers)}"]
    if model.layers % parts == 0:
        return chunks
    if (model.layers + 2) % parts == 0:
        return [*chunks, "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
    return [f"--pipeline-model-parallel-layout={pipeline_layout(layout, model.layers)}"]


def pipeline_layout(layout: Layout, layers: int) -> str:
    """Return Megatron's text of an uneven pipeline: E, t and L for embedding, layers, loss; | between chunks.

    A stage has the layers of ``cost.stage_layers``; within it, earlier chunks have one more.
    """
    held = layers_of(layers, layout.pp, layout.head_layers)
    chunks = [
        held[stage] // layout.vpp + (chunk < held[stage] % layout.vpp)
        for chunk in range(layout.vpp)
        for stage in range(layout.pp)
    ]
    return "E" + "|".join("t" * count for count in chunks) + "L"


# -- torchtitan 0.3 ----------------------------------------------------------------------------------------------------

TITAN_CONFIGS = {
    "llama3-8b": "llama3 llama3_8b", "llama3-70b": "llama3 llama3_70b",
    "deepseek-v2-lite": "deepseek_v3 deepseek_v3_16b", "deepseek-v3": "deepseek_v3 deepseek_v3_671b",
    "qwen3-30b-a3b": "qwen3 qwen3_30b_a3b", "gpt-oss-20b": "gpt_oss gpt_oss_20b",
    "gpt-oss-120b": "gpt_oss gpt_oss_120b",
}  # fmt: skip
"""Its --module and --config, by our name of the model."""
_TITAN_PRECISE = {
    ("llama3-8b", "mxfp8"): "llama3 llama3_8b_mxfp8", ("llama3-405b", "fp8"): "llama3 llama3_405b",
    ("deepseek-v3", "fp8"): "deepseek_v3 deepseek_v3_671b_float8",
}  # fmt: skip


def torchtitan(layout: Layout, model: Transformer, precision: str = "") -> list[str]:
    """Return arguments of torchtitan 0.3. A model that it has no --config for is chosen by the user's own.

    Raises UsageError for a layout that it does not run, and for a precision that no --config of this model has.
    """
    modes = {Recompute.NONE: "none", Recompute.FULL: "full", Recompute.ALTERNATE: "selective"}
    moved = layout.offload >= Offload.ACTIVATIONS or (layout.offload and layout.zero < 3)
    shares = layout.dp * layout.cp > 1  # without anything to share, FSDP of one rank casts alone
    other = layout.schedule != Schedule.ONE_F_ONE_B or layout.recompute not in modes or moved
    if other or (shares and layout.zero < 2):
        raise UsageError(f"torchtitan does not run {layout}: plan with --framework torchtitan")
    parallel: dict[str, object] = {
        "data_parallel_replicate_degree": layout.replicas,
        "data_parallel_shard_degree": layout.dp // layout.replicas,
        "fsdp_reshard_after_forward": "always" if layout.zero == 3 and layout.pp == 1 else "never",
        "tensor_parallel_degree": layout.tp,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
    }
    if layout.ep > 1:
        parallel["expert_parallel_degree"] = layout.ep
    local = layout.micro_batch
    if layout.pp > 1:
        parallel["pipeline_parallel_schedule"] = "Interleaved1F1B" if layout.vpp > 1 else "1F1B"
        parallel["pipeline_parallel_microbatch_size"] = layout.micro_batch
        parallel |= _titan_stages(layout, model.layers)
        local *= layout.micro_batches
    words = [
        *_titan_model(model.name, precision),
        *(f"--parallelism.{name}={value}" for name, value in parallel.items()),
    ]
    batch = {"local_batch_size": local, "global_batch_size": layout.global_batch, "seq_len": model.seq}
    words += [f"--training.{name}={value}" for name, value in batch.items()]
    words += ["--training.enable_cpu_offload"] * (layout.offload > 0)
    words += ["--training.disable_cuda_graphs"] * (layout.pp > 1 or layout.ep > 1)  # torchtitan refuses them there
    return [*words, f"activation-checkpoint:{modes[layout.recompute]}"]


def _titan_stages(layout: Layout, layers: int) -> dict[str, int]:
    """Return how layers are spread; nothing where torchtitan's own way is as even."""
    parts = layout.pp * layout.vpp
    head = layout.head_layers
    for first, last in ((0, head), (1, head + 1), (0, head + 1)):
        if (layers + first + last) % parts == 0:
            return {
                "pipeline_parallel_first_stage_less_layers": first,
                "pipeline_parallel_last_stage_less_layers": last,
                "pipeline_parallel_layers_per_stage": (layers + first + last) // parts,
            }
    # layers that are left over go to the first stages
    less = {"pipeline_parallel_first_stage_less_layers": 0, "pipeline_parallel_last_stage_less_layers": head}
    return less if head else {}


def _titan_model(name: str, precision: str) -> list[str]:
    """Return the model's words, none where torchtitan has no --config for it."""
    plain = precision in ("", "bf16")
    found = TITAN_CONFIGS.get(name, "") if plain else _TITAN_PRECISE.get((name, precision))
    if found is None:
        raise UsageError(
            f"--emit torchtitan: its precision {precision} is part of a --config, and it has none for {name}: plan "
            "with it, and emit env"
        )
    return [f"--{word}={value}" for word, value in zip(("module", "config"), found.split(), strict=False)]


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------


def deepspeed(layout: Layout, precision: str = "") -> dict[str, object]:
    """Return DeepSpeed's configuration, for ``deepspeed.initialize(config=…)``.

    Tensor parallelism is DeepSpeed's own (autotp), stages are those of its PipelineModule; without a pipeline, what is
    recomputed is up to the model. Raises UsageError for a layout or a precision that it does not have.
    """
    stays = layout.offload >= Offload.ACTIVATIONS and layout.recompute != Recompute.FULL
    other = layout.cp > 1 or layout.replicas > 1 or layout.etp > 1 or layout.head_layers or stays
    if layout.vpp > 1 or layout.schedule != Schedule.ONE_F_ONE_B or other or (layout.offload % 2 and not layout.zero):
        raise UsageError(f"DeepSpeed does not run {layout}: plan with --framework DeepSpeed")
    if precision not in ("", "bf16", "fp16", "fp32"):
        raise UsageError(f"--emit deepspeed: its configuration has no {precision}: bf16, fp16 or fp32")
    found: dict[str, object] = {
        "train_batch_size": layout.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.micro_batches,
        "zero_optimization": {"stage": layout.zero},
    }
    if layout.offload % 2:
        found["zero_optimization"] = {"stage": layout.zero, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    if layout.offload >= Offload.ACTIVATIONS:
        found["activation_checkpointing"] = {"cpu_checkpointing": True}
    if precision != "fp32":
        found["fp16" if precision == "fp16" else "bf16"] = {"enabled": True}
    if layout.tp > 1:
        found["tensor_parallel"] = {"autotp_size": layout.tp}
    if layout.pp > 1:
        interval = int(layout.recompute == Recompute.FULL)
        found["pipeline"] = {"stages": layout.pp, "activation_checkpoint_interval": interval}
    return found
