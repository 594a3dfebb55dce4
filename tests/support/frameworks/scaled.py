"""Run a script whose framework computes in float16 with a scaler on processors: scaled.py SCRIPT [WORD…].

Lightning, Accelerate and Hugging Face's Trainer offer it on GPUs alone; DeepSpeed, where the processor has its own
operations for float16. torch computes with it on all. A GradScaler's scale grows every 4 steps, so that a restart has
to know it.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import torch


def scaler() -> Any:
    """Return one whose scale changes soon."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)


def plant(kind: Any, after: Any) -> None:
    """Have objects of ``kind`` begin with what ``after`` makes of their words."""
    made = kind.__init__

    def begin(self: Any, *words: Any, **named: Any) -> None:
        after(self, lambda **more: made(self, *words, **named, **more))

    kind.__init__ = begin


def _accelerator(self: Any, make: Any) -> None:
    make()
    self.native_amp, self.state._mixed_precision = True, "fp16"
    self.scaler = scaler()


def _trainer(self: Any, make: Any) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    make(plugins=[MixedPrecision("16-mixed", device="cpu", scaler=scaler())])


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    if "lightning" in sys.argv[0]:
        import lightning.pytorch

        plant(lightning.pytorch.Trainer, _trainer)
    elif "deepspeed" in sys.argv[0]:
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: True
    else:
        import accelerate

        plant(accelerate.Accelerator, _accelerator)
    runpy.run_path(sys.argv[0], run_name="__main__")
