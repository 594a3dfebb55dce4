"""Copies that run during the next forward and backward pass: which tensors may wait, and what waits for them.

Parameters and optimizer state change only in ``optimizer.step()`` (RES-13), so their copies may go on until then. Torch
calls a hook at the beginning of every optimizer's step, which waits here.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakSet

from resilio_hpc.ckpt.state.slab import is_dtensor
from resilio_hpc.ckpt.state.tensors import LARGE_BYTES, Leaf, is_tensor

Key = tuple[int, int]


class Fenced(Protocol):
    """A saver that may be copying in the background."""

    def fence(self) -> None:
        """Return when nothing is read from the state any more."""
        ...


def is_optimizer(value: Any) -> bool:
    """Return whether it is a torch optimizer, whose steps call the hook."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.optim.Optimizer)


def owned(leaves: Sequence[Leaf], optimizers: Sequence[Any]) -> list[bool]:
    """Return, for each leaf, whether only steps of these optimizers change it, and torch counts its changes."""
    keys: set[Key] = set()
    for optimizer in optimizers:
        keys.update(_key(value) for group in optimizer.param_groups for value in group["params"])
        keys.update(_key(value) for state in optimizer.state.values() for value in _tensors(state))
    return [
        leaf.kind == "torch" and leaf.value is not None and _key(leaf.value) in keys and not leaf.value.is_inference()
        for leaf in leaves
    ]


def may_wait(leaf: Leaf) -> bool:
    """Return whether another thread may copy it: it is on the CPU, in one piece, and not small."""
    value = leaf.value
    return bool(
        leaf.size_bytes >= LARGE_BYTES
        and value.device.type == "cpu"
        and value.is_contiguous()
        and not value.is_conj()
        and not value.is_neg()
    )


def _key(value: Any) -> Key:
    local = value.detach().to_local() if is_dtensor(value) else value
    return local.data_ptr(), local.nbytes


def _tensors(state: Any) -> list[Any]:
    return [value for value in state.values() if is_tensor(value)] if isinstance(state, dict) else []


_fenced: WeakSet[Fenced] = WeakSet()
_lock = threading.Lock()
_hook: Any = None


def _forget_all() -> None:
    """Drop all, in a forked child: the parent copies the parent's memory, and its lock may be held for ever."""
    global _fenced, _lock
    _fenced, _lock = WeakSet(), threading.Lock()


os.register_at_fork(after_in_child=_forget_all)


def fence_before_steps(who: Fenced) -> None:
    """Let every step of every torch optimizer of this process call ``who.fence()`` first."""
    global _hook
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    with _lock:
        _fenced.add(who)
        if _hook is None:
            _hook = register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Fence before the optimizer changes anything.

    Torch's own do so after they have called a closure for the first time: Lightning's forward and backward pass.
    """
    named = "closure" in kwargs
    closure = kwargs["closure"] if named else next(iter(args[1:]), None)
    if closure is None or not type(optimizer).__module__.startswith("torch.optim."):
        _fence_all()
        return None

    def evaluate() -> Any:
        value = closure()
        _fence_all()
        return value

    return (args, {**kwargs, "closure": evaluate}) if named else ((args[0], evaluate, *args[2:]), kwargs)


def _fence_all() -> None:
    with _lock:
        waiting = list(_fenced)
    for who in waiting:
        who.fence()
