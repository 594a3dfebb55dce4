"""A choice in the form of a job or a training framework: ``--emit env|megatron|torchtitan|sbatch``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from resilio_hpc.autoparallel.base.layout import Layout, Recompute
from resilio_hpc.autoparallel.model.transformer import Transformer
from resilio_hpc.autoparallel.search.choice import Choice
from resilio_hpc.cli.plan.job import JobOf
from resilio_hpc.core.errors import UsageError
from resilio_hpc.slurm.submit import template_files

KINDS = ("env", "megatron", "torchtitan", "sbatch")


def emit(kind: str, choice: Choice, model: Transformer, command: Sequence[str]) -> str:
    """Return the text with its line end. Raises UsageError where the framework cannot run the layout."""
    if kind == "sbatch":
        if not command:
            raise UsageError("--emit sbatch: the training command goes behind --: … -- train.py --tensor-parallel {tp}")
        template = template_files.load("single-node" if choice.offer.shape.nodes == 1 else "multi-node")
        exports = [f"export {name}={value}" for name, value in choice.environment().items()]
        return JobOf(template, {}, tuple(command), os.environ).rendered(choice, exports)[0].script
    if kind == "env":
        return "".join(f"export {name}={value}\n" for name, value in choice.environment().items())
    words = (megatron if kind == "megatron" else torchtitan)(choice.layout, model)
    return shlex.join(words) + "\n"


def megatron(layout: Layout, model: Transformer) -> list[str]:
    """Return arguments of Megatron-LM."""
    if layout.zero > 1 or layout.schedule or layout.recompute == Recompute.ALTERNATE:
        raise UsageError(f"Megatron-LM does not run {layout}: plan with --framework Megatron-Core")
    words = [
        f"--tensor-model-parallel-size={layout.tp}",
        f"--pipeline-model-parallel-size={layout.pp}",
        f"--context-parallel-size={layout.cp}",
        f"--micro-batch-size={layout.micro_batch}",
        f"--global-batch-size={layout.global_batch}",
        f"--seq-length={model.seq}",
    ]
    words += [f"--num-layers-per-virtual-pipeline-stage={model.layers // (layout.pp * layout.vpp)}"] * (layout.vpp > 1)
    if model.layers % layout.pp:
        last = model.layers - -(-model.layers // layout.pp) * (layout.pp - 1)
        if last < 1:
            raise UsageError(f"Megatron-LM cannot spread {model.layers} layers over {layout.pp} stages: choose --pp")
        words.append(f"--decoder-last-pipeline-num-layers={last}")
    words += [f"--expert-model-parallel-size={layout.ep}"] * (layout.ep > 1)
    words += ["--sequence-parallel"] * layout.sequence_parallel
    words += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"] * (layout.zero == 1)
    if layout.recompute == Recompute.FULL:
        return [*words, "--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1"]
    return words + ["--recompute-granularity=selective"] * (layout.recompute == Recompute.SELECTIVE)


def torchtitan(layout: Layout, model: Transformer) -> list[str]:
    """Return arguments of torchtitan."""
    modes = {Recompute.NONE: "none", Recompute.FULL: "full", Recompute.ALTERNATE: "selective"}
    if layout.zero < 2 or layout.schedule or layout.recompute not in modes:
        raise UsageError(f"torchtitan does not run {layout}: plan with --framework torchtitan")
    parallel = {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": layout.dp,
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
    return words + ["--activation_checkpoint.selective_ac_option=2"] * (layout.recompute == Recompute.ALTERNATE)
