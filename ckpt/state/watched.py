"""The tensors of torch's modules and optimizers in a state, each with what tells whether it has changed.

To walk them takes long with thousands of parameters. So the list is kept while the objects are the same, and what
saves from it looks whether it still is the whole list.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

from resilio_hpc.ckpt.state import containers, overlap, tensors

MOST_COPIED = 4 << 20  # copied in a millisecond
"""Bytes of tensors that are copied at each boundary; others must not change until the next optimizer's step."""

Key = tuple[int, int]
Groups = list[dict[str, Any]]


def key_of(tensor: Any) -> Key:
    """Return address and size of a torch tensor's elements in this process."""
    local = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    return int(local.data_ptr()), int(local.nbytes)


def is_module(value: Any) -> bool:
    """Return whether it is a module of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def is_schedule(value: Any) -> bool:
    """Return whether it is a learning rate's schedule of torch, which is the same on all ranks."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.optim.lr_scheduler.LRScheduler)


def is_scaler(value: Any) -> bool:
    """Return whether it is a GradScaler of torch, which is the same on all ranks."""
    amp = sys.modules.get("torch.amp")
    return isinstance(value, getattr(amp, "GradScaler", ()))


class Watched:
    """The tensors of some modules and optimizers.

    ``objects``: these modules and optimizers; ``tensors``: those that must not change, with their ``paths``; ``small``:
    those to copy.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        """Walk modules and optimizers."""
        self.objects = list(objects)
        self._sizes = [_size(value) for value in objects]
        self.tensors: list[Any] = []
        self.paths: list[str] = []
        self.small: list[Any] = []
        self.copied_bytes = 0
        self._is_of_lists = False  # of an optimizer whose every step makes other tensors (LBFGS)
        self.places: list[Any] | None = None  # the devices of all these, once they were looked for
        seen: set[int] = set()
        for optimizer in (value for value in objects if overlap.is_optimizer(value)):
            self._add_optimizer(optimizer, seen)
        for module in (value for value in objects if is_module(value)):
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                size = int(tensor.nbytes)
                if self.copied_bytes + size <= MOST_COPIED:
                    self.copied_bytes += size
                    self.small.append(tensor)
                else:
                    self._add(tensor, name)
        self._where = [key_of(tensor) for tensor in self.tensors]
        self._keys = frozenset(self._where)

    def is_of(self, objects: Sequence[Any]) -> bool:
        """Return whether these are the same modules and optimizers, and the latter have as much state."""
        return (
            not self._is_of_lists
            and len(objects) == len(self.objects)
            and all(one is other for one, other in zip(objects, self.objects, strict=True))
            and [_size(value) for value in objects] == self._sizes
        )

    def versions(self) -> list[int]:
        """Return torch's counters of the changes of ``tensors``."""
        return [tensor._version for tensor in self.tensors]

    def has(self, tensor: Any) -> bool:
        """Return whether a tensor that must not change has these elements."""
        return key_of(tensor) in self._keys

    def moved(self) -> str:
        """Return the path of a tensor whose elements were replaced by others since the list was made, or ""."""
        pairs = zip(self.tensors, self._where, self.paths, strict=True)
        return next((path for tensor, where, path in pairs if key_of(tensor) != where), "")

    @property
    def last_trained(self) -> Any:
        """Return the last parameter of the last optimizer that gets gradients; None without one."""
        groups = [group for one in self.objects if overlap.is_optimizer(one) for group in one.param_groups]
        trained = (one for group in reversed(groups) for one in reversed(group["params"]) if one.requires_grad)
        return next(trained, None)

    def _add_optimizer(self, optimizer: Any, seen: set[int]) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._add_once(parameter, "a parameter", seen)
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                self._is_of_lists |= containers.is_container(value)
                self._add_state(value, seen)

    def _add_state(self, value: Any, seen: set[int]) -> None:
        if tensors.is_tensor(value) and hasattr(value, "detach"):
            self._add_once(value, "the state of an optimizer", seen)
        for _, item in containers.parts(value):
            self._add_state(item, seen)

    def _add_once(self, tensor: Any, path: str, seen: set[int]) -> None:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            self._add(tensor, path)

    def _add(self, tensor: Any, path: str) -> None:
        self.tensors.append(tensor)
        self.paths.append(path)


def torch_objects(state: Any) -> list[Any]:
    """Return the modules and optimizers in a nest of containers."""
    if overlap.is_optimizer(state) or is_module(state):
        return [state]
    return [found for _, item in containers.parts(state) for found in torch_objects(item)]


def groups_of(optimizer: Any) -> Groups:
    """Return copies of an optimizer's groups without their parameters: learning rates, and the like."""
    return [
        {
            name: value.detach().clone() if hasattr(value, "detach") else copy.copy(value)
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def _size(value: Any) -> int:
    if not overlap.is_optimizer(value):
        return 0
    return len(value.state) + sum(len(group["params"]) for group in value.param_groups)
