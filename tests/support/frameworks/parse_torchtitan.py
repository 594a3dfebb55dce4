"""Reads commands, as lists of words in JSON, with torchtitan's own parser; prints what it made of each.

Runs in the environment of scripts/frameworks_setup.sh.
"""

from __future__ import annotations

import json
import sys

from torchtitan.config import ConfigManager

found = []
for words in json.load(sys.stdin):
    config = ConfigManager().parse_args(words)
    parallel, batch = config.parallelism, config.training
    found.append({
        "tp": parallel.tensor_parallel_degree, "pp": parallel.pipeline_parallel_degree,
        "cp": parallel.context_parallel_degree, "shards": parallel.data_parallel_shard_degree,
        "replicas": parallel.data_parallel_replicate_degree, "ep": parallel.expert_parallel_degree,
        "offload": batch.enable_cpu_offload,
        "local_batch": batch.local_batch_size, "global_batch": batch.global_batch_size, "seq": batch.seq_len,
        "recompute": type(config.activation_checkpoint).__qualname__, "layers": len(config.model_spec.model.layers),
    })  # fmt: skip
print(json.dumps(found))
