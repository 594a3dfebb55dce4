"""What a training script may import; all of it optional, none of it needs our launcher."""

from resilio_hpc.train.exact_resume import warm_up_ddp
from resilio_hpc.train.run import Run, attach

__all__ = ["Run", "attach", "warm_up_ddp"]
