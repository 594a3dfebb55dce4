"""Run a script whose Lightning or Accelerate computes with a GradScaler on processors: scaled.py SCRIPT [WORD…].

Both of them offer float16 on GPUs alone. The scale grows every 4 steps, so that a restart has to know it.
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
    self.scaler = scaler()


def _trainer(self: Any, make: Any) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    make(plugins=[MixedPrecision("16-mixed", device="cpu", scaler=scaler())])


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    if "lightning" in sys.argv[0]:
        import lightning.pytorch

        plant(lightning.pytorch.Trainer, _trainer)
    else:
        import accelerate

        plant(accelerate.Accelerator, _accelerator)
    runpy.run_path(sys.argv[0], run_name="__main__")
