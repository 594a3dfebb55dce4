"""Run a script, note what it has trained, and strike one of its ranks in the midst of a step, whatever the framework.

strike.py [STEP RANK HOW] SCRIPT [WORD…]     HOW: kill, raise, memory (of the GPU is full), exit (with 137, as after
a kill in a container), stop (SIGSTOP), or wait (until the file "go on" is there)

It strikes once, in the first life of a job's ranks: in the forward pass after STEP optimizer steps. At a good
end each rank writes what its optimizers and its model hold, as SHA-256, to "end/RANK".
"""

from __future__ import annotations

import gc
import hashlib
import os
import runpy
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook


class Watched:
    """What the training of this process goes through."""

    def __init__(self, step: int, rank: str, how: str) -> None:
        self._step, self._how, self._done = step, how, 0
        first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        self._is_struck = not first_life or os.environ.get("RANK", "0") != rank or Path("struck").exists()
        self._trained: dict[int, tuple[Any, Any]] = {}
        self._model: Any = None
        register_optimizer_step_post_hook(self._stepped)
        register_module_forward_pre_hook(self._strike)

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        self._done += 1
        for group in optimizer.param_groups:  # ZeRO 3 has its parameters there for this moment alone
            self._trained.update((id(one), (one, optimizer)) for one in group["params"])

    def _strike(self, module: Any, _: Any) -> None:
        self._model = module if self._model is None else self._model
        if self._is_struck or not module.training or self._done != self._step:
            return
        self._is_struck = True
        Path("struck").touch()
        if self._how in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if self._how == "kill" else signal.SIGSTOP)
        if self._how == "raise":
            raise ValueError("planted")
        if self._how == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if self._how == "exit":
            os._exit(137)
        while not Path("go on").exists():
            time.sleep(0.01)

    def digest(self) -> str:
        """A line for each parameter, buffer, and state of an optimizer, with its SHA-256."""
        engines = [one for one in gc.get_objects() if type(one).__name__ == "DeepSpeedEngine"]
        held = _of_zero(engines[0]) if engines else self._of_torch()
        return "".join(f"{name} {_digest(value)}\n" for name, value in held)

    def _of_torch(self) -> Iterator[tuple[str, Any]]:
        if type(self._model).__name__ != "FullyShardedDataParallel":  # else all ranks would have to gather it
            yield from sorted(self._model.state_dict().items())
        for number, (parameter, optimizer) in enumerate(self._trained.values()):
            yield f"{number}", parameter
            yield from sorted(optimizer.state[parameter].items())
        scalers = (one for one in gc.get_objects() if type(one) is torch.amp.GradScaler)
        yield from (("scale", sorted(one.state_dict().items())) for one in scalers)


def _of_zero(engine: Any) -> Iterator[tuple[str, Any]]:
    """What DeepSpeed itself says of whole parameters: its partitions end with memory that has no meaning."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    yield from engine.module.named_buffers()
    for name, parameter in engine.module.named_parameters():
        whole = safe_get_full_fp32_param(parameter)
        with deepspeed.zero.GatheredParameters([parameter]):
            assert torch.equal(parameter.data, whole.to(parameter.dtype)), f"{name}: the model computes with others"
        yield name, whole
        for key in ("exp_avg", "exp_avg_sq"):
            yield key, safe_get_full_optimizer_state(parameter, key)
    yield "steps", {float(state["step"]) for state in engine.optimizer.optimizer.state.values()}
    yield "counters", (engine.global_steps, engine.global_samples, engine.lr_scheduler.state_dict())
    yield "scale", sorted((key, one) for key, one in vars(engine.optimizer.loss_scaler).items() if key != "dtype")
    yield "skipped", engine.skipped_steps


def _digest(value: Any) -> str:
    if not torch.is_tensor(value):
        return repr(value)
    value = value.to_local() if hasattr(value, "to_local") else value
    return hashlib.sha256(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()


def main() -> None:
    """Plant it, run the script, and note its end."""
    is_struck = sys.argv[1].isdigit()
    watched = Watched(int(sys.argv[1]), sys.argv[2], sys.argv[3]) if is_struck else Watched(-1, "", "")
    sys.argv = sys.argv[4 if is_struck else 1 :]
    runpy.run_path(sys.argv[0], run_name="__main__")
    Path("end").mkdir(exist_ok=True)
    (Path("end") / os.environ.get("RANK", "0")).write_text(watched.digest())


if __name__ == "__main__":
    main()
