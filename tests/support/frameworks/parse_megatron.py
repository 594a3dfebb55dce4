"""Makes Megatron-Core's own configurations of emitted arguments: they check names, values and how these fit together.

The wheel of megatron-core has no megatron/training/arguments.py, whose argparse names differ from the fields in a few
cases: RENAMED. Arguments of the training loop alone have no field there: TRAINING. Reads lists of words in JSON, prints
what the configuration made of each. Runs in the environment of scripts/frameworks_setup.sh.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

RENAMED = {
    "num_experts": "num_moe_experts", "fp8_format": "fp8", "fp4_format": "fp4", "swiglu": "gated_linear_unit",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
}  # fmt: skip
TRAINING = {
    "max_position_embeddings", "position_embedding_type", "vocab_size", "tokenizer_type", "micro_batch_size",
    "global_batch_size", "seq_length", "untie_embeddings_and_output_weights", "group_query_attention",
    "multi_latent_attention", "use_precision_aware_optimizer", "use_distributed_optimizer",
    "overlap_grad_reduce", "overlap_param_gather",
}  # fmt: skip
# one of its fields asks for the version of Transformer Engine, which is not here
OPTIMIZER = {field.name for field in dataclasses.fields(OptimizerConfig)} - {"use_precision_aware_optimizer"}
REDUCING = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}


def value_of(text: str, equals: str) -> Any:
    if not equals:
        return True
    if text.isdecimal():
        return int(text)
    return float(text) if text.replace(".", "", 1).isdecimal() else text


found = []
for words in json.load(sys.stdin):
    fields: dict[str, Any] = {}
    name = ""
    rest: dict[str, Any] = {}
    for word in words:
        if not word.startswith("--"):  # one more value of the option before it
            fields[name] = [*(fields[name] if isinstance(fields[name], list) else []), word]
            continue
        name, equals, text = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        name = RENAMED.get(name, name)
        if name == "disable_bias_linear":
            fields["add_bias_linear"] = False
        elif name == "moe_layer_freq":
            dense, moe = (int(part.partition("*")[2].rstrip(")")) for part in text.split("+"))
            fields[name] = [0] * dense + [1] * moe
        elif name in TRAINING or name in OPTIMIZER - {"bf16", "fp16"}:
            rest[name] = value_of(text, equals)
        else:
            fields[name] = value_of(text, equals)
    DistributedDataParallelConfig(**{name: value for name, value in rest.items() if name in REDUCING})
    optimizer = OptimizerConfig(**{name: value for name, value in rest.items() if name in OPTIMIZER})
    kind = MLATransformerConfig if "multi_latent_attention" in rest else TransformerConfig
    fields["pipeline_dtype"] = torch.float16 if "fp16" in fields else torch.bfloat16
    config = kind(**fields)
    found.append({
        "tp": config.tensor_model_parallel_size, "pp": config.pipeline_model_parallel_size,
        "vpp": config.virtual_pipeline_model_parallel_size or 1, "cp": config.context_parallel_size,
        "ep": config.expert_model_parallel_size, "layers": config.num_layers, "hidden": config.hidden_size,
        "etp": config.expert_tensor_parallel_size, "moved": config.offload_modules,
        "optimizer_moved": optimizer.optimizer_cpu_offload and optimizer.optimizer_offload_fraction,
        "recompute": config.recompute_granularity or "none",
    })  # fmt: skip
print(json.dumps(found))
