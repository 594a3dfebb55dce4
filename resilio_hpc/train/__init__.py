"""What a training script may import; all of it is optional, and works without resilio-launch."""

from resilio_hpc.train.batches import BatchPlan, accumulation_steps, keep_batch, scale_batch
from resilio_hpc.train.exact_resume import warm_up_ddp
from resilio_hpc.train.restartable import restartable
from resilio_hpc.train.run import Run, attach
from resilio_hpc.train.samples import SampleOrder

__all__ = [
    "BatchPlan", "Run", "SampleOrder", "accumulation_steps", "attach", "keep_batch", "restartable", "scale_batch",
    "warm_up_ddp",
]  # fmt: skip
