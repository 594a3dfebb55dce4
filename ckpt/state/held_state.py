"""A state at a step boundary, which may be saved later, while the next step's optimizer has not changed it.

Parameters and optimizer state change in ``optimizer.step()``. All else of a state is small as a rule, and is copied at
the boundary: plain values, states of schedulers and loaders, running statistics. So a rank that cannot finish its step
can still save the one before, for little at each boundary. Torch counts the changes of its tensors, so that a change
outside of an optimizer's step is seen.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

from resilio_hpc.ckpt.state import containers, overlap, tensors, tree
from resilio_hpc.ckpt.state.outline import outline
from resilio_hpc.ckpt.state.paths import joined
from resilio_hpc.ckpt.state.slab import Slab, slab_of
from resilio_hpc.core.errors import CheckpointError

MOST_COPIED = 16 << 20
"""Bytes of tensors that are copied at each boundary; others must not change until the next optimizer's step."""


class NotHeld(CheckpointError):
    """Raised where a state cannot be saved later, or has changed since."""


class HeldState:
    """A state as it is now, after ``step`` steps. ``outline``: what a lost rank needs besides another rank's copy."""

    def __init__(self, step: int, state: Any) -> None:
        """Hold it. Raises NotHeld, UsageError."""
        self.step = step
        self._copied: dict[tuple[int, int], Any] = {}  # copies of tensors, by memory and size of the original
        self._groups: dict[int, list[dict[str, Any]]] = {}  # by id of an optimizer: its groups without parameters
        self._watched: list[tuple[Any, str]] = []  # tensors that must not change
        self._room = MOST_COPIED
        self._owned: set[int] = set()  # ids of tensors that only optimizers change
        self._owned_keys: set[tuple[int, int]] | None = None  # their memory and size, once it is needed
        optimizers = _optimizers(state)
        for optimizer in optimizers:
            self._hold_optimizer(optimizer)
        self._state = self._hold(state, ())
        self._versions = [tensor._version for tensor, _ in self._watched]
        self.outline = outline(self._state)

    def flattened(self) -> tree.Flattened:
        """Return the state as it was, its large tensors where they are. Raises NotHeld where one has changed."""
        found = tree.flatten(self._state, self._state_of)
        self.check()
        return found

    def check(self) -> None:
        """Raise NotHeld where a tensor that was not copied has changed since."""
        for (tensor, path), version in zip(self._watched, self._versions, strict=True):
            if tensor._version != version:
                raise NotHeld(f"{path} was changed before the next optimizer.step()")

    # -- at the boundary -------------------------------------------------------------------------------------------

    def _hold(self, value: Any, path: tuple[Any, ...]) -> Any:
        """Return what stands for ``value``: copies of containers and small tensors, torch's objects themselves."""
        if containers.is_container(value):
            if containers.holds_scalars_only(value):
                return copy.copy(value)
            if isinstance(value, dict):
                return containers.alike_dict(value, {k: self._hold(v, (*path, k)) for k, v in value.items()})
            return containers.alike(value, [self._hold(item, (*path, at)) for at, item in enumerate(value)])
        if tensors.is_tensor(value) or type(value) is Slab:
            return self._hold_tensor(value, path)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.nn.Module):
            for name, tensor in (*value.named_parameters(), *value.named_buffers()):
                self._hold_in_module(tensor, (*path, name))
            return value
        if overlap.is_optimizer(value):
            return value
        if tree.has_state(value):
            return self._hold(value.state_dict(), path)
        return copy.copy(value) if isinstance(value, bytearray | set) else value

    def _hold_optimizer(self, optimizer: Any) -> None:
        self._groups[id(optimizer)] = [
            {name: copy.copy(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        for group in optimizer.param_groups:
            self._own(group["params"], "a parameter")
        for state in optimizer.state.values():
            if isinstance(state, dict):
                self._own([value for value in state.values() if tensors.is_tensor(value)], "an optimizer's state")

    def _own(self, found: list[Any], what: str) -> None:
        self._owned.update(map(id, found))
        self._watched += [(tensor, what) for tensor in found]

    def _hold_in_module(self, tensor: Any, path: tuple[Any, ...]) -> None:
        if not self._is_owned(tensor) and (key := _key(tensor)) not in self._copied:
            copied = self._copy(tensor)
            if copied is None:
                self._watched.append((tensor, joined(path)))
            else:
                self._copied[key] = copied

    def _hold_tensor(self, value: Any, path: tuple[Any, ...]) -> Any:
        slab = slab_of(value)
        tensor = slab.tensor if slab is not None else value
        if self._is_owned(tensor):
            return value
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(tensor, numpy.ndarray):
            copied = self._copy(tensor)
            if copied is None:
                raise NotHeld(f"{joined(path)} is an array of numpy, whose changes are not counted, and too large")
        else:
            self._hold_in_module(tensor, path)
            copied = self._copied.get(_key(tensor))
        if copied is None:
            return value
        return copied if slab is None else Slab(copied, slab.global_shape, slab.start, slab.replica)

    def _is_owned(self, tensor: Any) -> bool:
        """Return whether only optimizers change it. Another view of the same elements is the same tensor."""
        if id(tensor) in self._owned:
            return True
        if self._owned_keys is None:
            self._owned_keys = {_key(owned) for owned, _ in self._watched}
        return hasattr(tensor, "detach") and _key(tensor) in self._owned_keys

    def _copy(self, tensor: Any) -> Any:
        """Return a copy, None where it is too large."""
        size = int(tensor.nbytes)
        if size > self._room:
            return None
        self._room -= size
        return tensor.detach().clone() if hasattr(tensor, "detach") else tensor.copy()

    # -- when it is saved ------------------------------------------------------------------------------------------

    def _state_of(self, value: Any) -> Any:
        """Return the state of one of torch's objects as it was at the boundary."""
        state = value.state_dict()
        groups = self._groups.get(id(value))
        if groups is not None:
            held = [{**now, **then} for now, then in zip(state["param_groups"], groups, strict=True)]
            return {**state, "param_groups": held}
        return containers.map_leaves(state, self._as_it_was) if self._copied else state

    def _as_it_was(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(value, torch.Tensor):
            return value
        return self._copied.get(_key(value), value)


def _optimizers(state: Any) -> list[Any]:
    if overlap.is_optimizer(state):
        return [state]
    return [found for _, item in containers.parts(state) for found in _optimizers(item)]


def _key(tensor: Any) -> tuple[int, int]:
    local = tensor.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    return int(local.data_ptr()), int(local.nbytes)
