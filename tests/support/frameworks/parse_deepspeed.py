"""Reads configurations, as objects in JSON, with DeepSpeed's own DeepSpeedConfig; prints what it made of each.

Each has the number of data-parallel ranks beside it. Runs in the environment of scripts/frameworks_setup.sh.
"""

from __future__ import annotations

import json
import sys

from deepspeed import comm
from deepspeed.runtime.config import DeepSpeedConfig

comm.get_rank = lambda group=None: 0  # without a process group DeepSpeed checks the batch for one rank only


class Ranks:
    """What DeepSpeed asks of a grid of ranks while it checks the batch."""

    def __init__(self, count: int) -> None:
        self._count = count

    def get_data_parallel_world_size(self) -> int:
        return self._count


found = []
for settings, ranks in json.load(sys.stdin):
    config = DeepSpeedConfig(settings, mpu=Ranks(ranks))
    found.append({
        "batch": config.train_batch_size, "micro_batch": config.train_micro_batch_size_per_gpu,
        "accumulation": config.gradient_accumulation_steps, "zero": int(config.zero_config.stage),
        "stages": config.pipeline["stages"], "interval": config.pipeline["activation_checkpoint_interval"],
        "optimizer_on": "cpu" if "cpu" in str(getattr(config.zero_config.offload_optimizer, "device", "")) else "gpu",
        "checkpoints_on_host": config.activation_checkpointing_config.cpu_checkpointing,
        "tp": config.tensor_parallel_config.autotp_size, "bf16": config.bfloat16_config.enabled,
    })  # fmt: skip
print(json.dumps(found))
