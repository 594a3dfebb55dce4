"""The expected size of a state's snapshot, before the first step, when optimizers have no state yet."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from resilio_hpc.ckpt.state import containers
from resilio_hpc.ckpt.state.any_layout import AnyLayout
from resilio_hpc.ckpt.state.flat_slab import FlatSlab
from resilio_hpc.ckpt.state.overlap import is_optimizer
from resilio_hpc.ckpt.state.slab import slab_of
from resilio_hpc.ckpt.state.tensors import is_tensor


def expected_bytes(state: Any) -> int:
    """Return the bytes of a state's tensors once it has been trained, each counted once.

    It does not call state_dict(). An optimizer without state is expected to get as many tensors of a parameter's size
    as its kind has: two in the Adam family, one for momentum and one for any other that is not SGD.
    """
    found: dict[Any, int] = {}
    _collect(state, found)
    return sum(found.values())


def _collect(value: Any, found: dict[Any, int]) -> None:
    torch = sys.modules.get("torch")
    slab = slab_of(value)
    if containers.is_container(value):
        for _, item in containers.parts(value):
            _collect(item, found)
    elif type(value) is AnyLayout:
        _collect(value.saved, found)
    elif type(value) is FlatSlab:
        _collect(value.tensor, found)
    elif slab is not None:
        _collect(slab.tensor, found)
    elif is_tensor(value):
        with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError, TypeError):
            # a kind without memory of its own, such as a ShardedTensor: code that needs it refuses it by name
            key = value.data_ptr() if hasattr(value, "data_ptr") else value.__array_interface__["data"][0]
            found[key, value.nbytes] = int(value.nbytes)
    elif torch is not None and isinstance(value, torch.nn.Module):
        _collect([*value.parameters(), *value.buffers()], found)
    elif torch is not None and isinstance(value, torch.optim.Optimizer):
        _collect_optimizer(value, found)
    else:
        _collect([one for one in getattr(value, "stands_for", ()) if is_optimizer(one)], found)


def _collect_optimizer(optimizer: Any, found: dict[Any, int]) -> None:
    if optimizer.state:
        _collect(list(optimizer.state.values()), found)
        return
    for group in optimizer.param_groups:
        averages = 2 if "betas" in group else 0 if "dampening" in group else 1
        copies = averages + bool(group.get("amsgrad")) + bool(group.get("momentum"))
        for parameter in group["params"]:
            found["state of", parameter.data_ptr(), parameter.nbytes] = copies * int(parameter.nbytes)


def holds_optimizer(state: Any) -> bool:
    """Return whether it holds a torch optimizer."""
    if any(map(is_optimizer, getattr(state, "stands_for", ()))):
        return True
    return is_optimizer(state) or any(holds_optimizer(item) for _, item in containers.parts(state))
