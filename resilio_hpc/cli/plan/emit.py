"""A choice in the form of a job or a training framework: ``--emit env|megatron|torchtitan|sbatch``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from resilio_hpc.autoparallel.base.layout import Layout, Recompute, Schedule
from resilio_hpc.autoparallel.model.model_description import TransformerModel
from resilio_hpc.autoparallel.model.transformer import Transformer
from resilio_hpc.autoparallel.search.choice import Choice
from resilio_hpc.cli.plan.job import JobOf
from resilio_hpc.cli.plan.model_flags import model_flags, precision_flags
from resilio_hpc.core.errors import UsageError
from resilio_hpc.slurm.submit import template_files

KINDS = ("env", "megatron", "torchtitan", "sbatch")
OF_FRAMEWORK = {"megatron": ("Megatron", "NeMo"), "torchtitan": ("torchtitan",)}
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
        wanted = "Megatron-Core" if kind == "megatron" else kind
        raise UsageError(f"--emit {kind} is for layouts of its own: plan with --framework {wanted}, not {framework}")


def emit(kind: str, choice: Choice, asked: Emitted) -> str:
    """Return the text with its line end. Raises UsageError where the framework cannot run the layout."""
    if kind == "sbatch":
        if not asked.command:
            raise UsageError("--emit sbatch: the training command goes behind --: … -- train.py --tensor-parallel {tp}")
        template = template_files.load("single-node" if choice.offer.shape.nodes == 1 else "multi-node")
        exports = [f"export {name}={value}" for name, value in choice.environment().items()]
        return JobOf(template, {}, tuple(asked.command), os.environ).rendered(choice, exports)[0].script
    if kind == "env":
        return "".join(f"export {name}={value}\n" for name, value in choice.environment().items())
    if kind == "megatron":
        words = [*model_flags(asked.description, asked.model), *precision_flags(asked.precision)]
        return shlex.join([*words, *megatron(choice.layout, asked.model)]) + "\n"
    return shlex.join(torchtitan(choice.layout, asked.model, asked.precision)) + "\n"


# -- Megatron-LM -------------------------------------------------------------------------------------------------------


def megatron(layout: Layout, model: Transformer) -> list[str]:
    """Return arguments of Megatron-LM for a layout."""
    if layout.zero > 1 or layout.schedule != Schedule.ONE_F_ONE_B or layout.recompute == Recompute.ALTERNATE:
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
        words += [f"--expert-tensor-parallel-size={min(layout.tp, layout.num_gpus // layout.pp // layout.ep)}"]
    if layout.sequence_parallel:
        words += ["--sequence-parallel", "--tp-comm-overlap"]
    words += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"] * (layout.zero == 1)
    if layout.recompute == Recompute.FULL:
        return [*words, "--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1"]
    return words + ["--recompute-granularity=selective"] * (layout.recompute == Recompute.SELECTIVE)


def _stages(layout: Layout, model: Transformer) -> list[str]:
    """Return how layers are spread over stages: evenly, with both ends counted as layers, or stage by stage."""
    parts = layout.pp * layout.vpp
    if layout.pp == 1:
        return []
    chunks = [f"--num-virtual-stages-per-pipeline-rank={layout.vpp}"] * (layout.vpp > 1)
    if model.layers % parts == 0:
        return chunks
    if (model.layers + 2) % parts == 0:
        return [*chunks, "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
    return [f"--pipeline-model-parallel-layout={pipeline_layout(layout, model.layers)}"]


def pipeline_layout(layout: Layout, layers: int) -> str:
    """Return Megatron's text of an uneven pipeline: E, t and L for embedding, layers, loss; | between chunks.

    A stage has the layers of ``cost.stage_layers``; within it, earlier chunks have one more.
    """
    most = -(-layers // layout.pp)
    missing = most * layout.pp - layers
    fewer = [layout.pp - 1, 0, *range(1, layout.pp - 1)][:missing]
    held = [most - (stage in fewer) for stage in range(layout.pp)]
    chunks = [
        held[stage] // layout.vpp + (chunk < held[stage] % layout.vpp)
        for chunk in range(layout.vpp)
        for stage in range(layout.pp)
    ]
    return "E" + "|".join("t" * count for count in chunks) + "L"


# -- torchtitan --------------------------------------------------------------------------------------------------------


def torchtitan(layout: Layout, model: Transformer, precision: str = "") -> list[str]:
    """Return arguments of torchtitan. Its model is chosen by --model.name and --model.flavor, which are the user's."""
    modes = {Recompute.NONE: "none", Recompute.FULL: "full", Recompute.ALTERNATE: "selective"}
    if layout.zero < 2 or layout.schedule != Schedule.ONE_F_ONE_B or layout.recompute not in modes:
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
        local *= layout.micro_batches
    words = [f"--parallelism.{name}={value}" for name, value in parallel.items()]
    batch = {"local_batch_size": local, "global_batch_size": layout.global_batch, "seq_len": model.seq}
    words += [f"--training.{name}={value}" for name, value in batch.items()]
    words += [f"--activation_checkpoint.mode={modes[layout.recompute]}"]
    words += ["--activation_checkpoint.selective_ac_option=2"] * (layout.recompute == Recompute.ALTERNATE)
    return words + ["--model.converters=float8"] * precision.startswith("fp8")
