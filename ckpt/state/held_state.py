"""A state at a step boundary, which may be saved later, while the next step's optimizer has not changed it.

Parameters and optimizer state change in ``optimizer.step()``. All else of a state is small as a rule, and is copied at
the boundary: plain values, states of schedulers and loaders, running statistics. So a rank that cannot finish its step
can still save the one before, for little at each boundary. Torch counts the changes of its tensors, so that a change
outside of an optimizer's step is seen.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from io import BytesIO
from typing import Any

from resilio_hpc.ckpt.state import containers, overlap, tensors, tree
from resilio_hpc.ckpt.state.any_layout import AnyLayout
from resilio_hpc.ckpt.state.flat_slab import FlatSlab, parts_of
from resilio_hpc.ckpt.state.own_part import own_part, own_paths
from resilio_hpc.ckpt.state.parts_held import WHOLE, PartsHeld, parts_held
from resilio_hpc.ckpt.state.paths import joined
from resilio_hpc.ckpt.state.slab import Slab, is_dtensor
from resilio_hpc.ckpt.state.watched import (
    MOST_COPIED,
    Groups,
    Key,
    Watched,
    groups_of,
    is_module,
    is_scaler,
    is_schedule,
    key_of,
    torch_objects,
)
from resilio_hpc.core.errors import CheckpointError


class NotHeld(CheckpointError):
    """Raised where a state cannot be saved later, or has changed since."""


class HeldState:
    """A state as it is now, after ``step`` steps. ``watched``: for the next one."""

    def __init__(self, step: int, state: Any, watched: Watched | None = None) -> None:
        """Hold it; ``watched``: of the one before. Raises NotHeld, UsageError."""
        self.step = step
        self.boundaries: dict[Any, Any] = {}  # by device: what its copies have to wait for
        objects = torch_objects(state)
        self.watched = watched if watched is not None and watched.is_of(objects) else Watched(objects)
        self._copied: dict[Key, Any] = {key_of(one): one.detach().clone() for one in self.watched.small}
        self._groups: dict[int, Groups] = {id(one): groups_of(one) for one in objects if overlap.is_optimizer(one)}
        self._schedules: dict[int, Any] = {}  # by id: their states, and those of scalers
        self._others: list[tuple[Any, str]] = []  # other tensors that must not change
        self._parts: set[Key] = set()  # of flat shards
        self._has_loose_parts = False  # of tensors, outside of torch's objects
        self._room = MOST_COPIED - self.watched.copied_bytes
        self._state = self._hold(state, ())
        self._versions = self.watched.versions(), [tensor._version for tensor, _ in self._others]

    def own_part(self, parts: PartsHeld = WHOLE) -> bytes:
        """Return what a lost rank needs besides another rank's copy."""
        return own_part(self._state, parts)

    def parts(self, declared: str = "") -> PartsHeld | None:
        """Return which parts of tensors this is; None where they are not known to be another rank's, too.

        ``declared``: the group by the script. Of torch's objects alone, since these are seen to be the same at the next
        boundary. Raises NotHeld, UsageError.
        """
        if self._has_loose_parts:
            return None
        return parts_held(self.flattened().leaves, own_paths(self._state), declared)

    @property
    def state(self) -> Any:
        """Return what stands for the state: copies of what is small, and torch's objects themselves."""
        return self._state

    def copies(self) -> list[tuple[Any, Any]]:
        """Return the small tensors of torch's objects, each with its copy."""
        return [(one, self._copied[key]) for one in self.watched.small if (key := key_of(one)) in self._copied]

    def groups(self) -> list[tuple[Any, Groups]]:
        """Return the optimizers, each with its groups as they were."""
        return [(one, self._groups[id(one)]) for one in self.watched.objects if id(one) in self._groups]

    def schedule_of(self, schedule: Any) -> Any:
        """Return the state of a learning rate's schedule, or of a scaler, as it was."""
        return self._schedules[id(schedule)]

    def flattened(self) -> tree.Flattened:
        """Return the state as it was, its large tensors where they are. Raises NotHeld where one has changed."""
        found = tree.flatten(self._state, self._state_of)
        self._check()
        if moved := self.watched.moved():
            raise NotHeld(f"{moved} was replaced by another tensor")
        known = (
            {key_of(copied) for copied in self._copied.values()}
            | {key_of(value) for _, groups in self.groups() for group in groups for value in _tensors_of(group)}
            | self._parts
            | {key_of(other) for other, _ in self._others}
        )
        for leaf in found.leaves:
            is_torch = leaf.kind == "torch" and leaf.size_bytes > 0
            if is_torch and not self.watched.has(leaf.value) and key_of(leaf.value) not in known:
                raise NotHeld(f"{leaf.path} has come into the state, or was replaced, since the last finished step")
        return found

    def with_live(self, state: Any, live: Any) -> Any:
        """Return ``state``, whose tensors have not changed, with all else as it was. ``live``: this object as it is."""
        return self._merged(state, self._state, live)

    def _merged(self, value: Any, held: Any, live: Any) -> Any:
        if value is live or is_module(value) or overlap.is_optimizer(value):
            return value
        if is_schedule(value) or is_scaler(value):
            return self._schedules[id(value)]
        if not containers.is_container(value) or containers.holds_scalars_only(value) or type(held) is not type(value):
            return held
        if isinstance(value, dict):
            return containers.alike_dict(held, {k: self._merged(value.get(k), held[k], live) for k in held})
        return containers.alike(held, [self._merged(one, was, live) for one, was in zip(value, held, strict=True)])

    def _check(self) -> None:
        """Raise NotHeld where a tensor that was not copied has changed since."""
        watched, others = self._versions
        for before, now, path in zip(watched, self.watched.versions(), self.watched.paths, strict=True):
            if before != now:
                raise NotHeld(f"{path} was changed outside of an optimizer's step")
        for before, (tensor, path) in zip(others, self._others, strict=True):
            if before != tensor._version:
                raise NotHeld(f"{path} was changed outside of an optimizer's step")

    # -- at the boundary -------------------------------------------------------------------------------------------

    def _hold(self, value: Any, path: tuple[Any, ...]) -> Any:
        """Return what stands for ``value``: copies of containers and small tensors, torch's objects themselves."""
        if containers.is_container(value):
            if containers.holds_scalars_only(value):
                return copy.copy(value)
            if isinstance(value, dict):
                return containers.alike_dict(value, {k: self._hold(v, (*path, k)) for k, v in value.items()})
            return containers.alike(value, [self._hold(item, (*path, at)) for at, item in enumerate(value)])
        if type(value) is AnyLayout:
            return self._hold(value.saved, path)
        if tensors.is_tensor(value) or type(value) in (Slab, FlatSlab):
            return self._hold_tensor(value, path)
        if is_module(value) or overlap.is_optimizer(value):
            return value
        if is_schedule(value) or is_scaler(value):  # a scaler changes, too, where it leaves an optimizer's step out
            self._schedules[id(value)] = self._hold(value.state_dict(), path)
            return value
        if tree.has_state(value):
            return self._hold(value.state_dict(), path)
        return copy.copy(value) if isinstance(value, bytearray | set | BytesIO) else value

    def _hold_tensor(self, value: Any, path: tuple[Any, ...]) -> Any:
        slab = value if type(value) in (Slab, FlatSlab) else None
        if type(slab) is FlatSlab and not len(slab.tensor):
            return slab
        tensor = slab.tensor if slab is not None else value
        self._has_loose_parts |= slab is not None or is_dtensor(tensor)
        held = self._hold_array(tensor, path) if not hasattr(tensor, "detach") else self._hold_torch(tensor, path)
        if slab is None:
            return held
        made = replace(slab, tensor=held)
        self._parts.update(key_of(part.tensor) for part in parts_of(made) if hasattr(part.tensor, "detach"))
        return made

    def _hold_array(self, array: Any, path: tuple[Any, ...]) -> Any:
        if array.nbytes > self._room:
            raise NotHeld(f"{joined(path)} is an array of numpy, whose changes are not counted, and too large to copy")
        self._room -= array.nbytes
        return array.copy()

    def _hold_torch(self, tensor: Any, path: tuple[Any, ...]) -> Any:
        """Return the tensor, or a copy. Another view of the same elements is the same tensor."""
        key = key_of(tensor)
        copied = self._copied.get(key)
        if copied is not None and copied.shape == tensor.shape and copied.dtype == tensor.dtype:
            return copied
        if self.watched.has(tensor):
            return tensor
        if tensor.nbytes > self._room:
            self._others.append((tensor, joined(path)))
            return tensor
        self._room -= tensor.nbytes
        self._copied[key] = tensor.detach().clone()
        return self._copied[key]

    # -- when it is saved ------------------------------------------------------------------------------------------

    def _state_of(self, value: Any) -> Any:
        """Return the state of one of torch's objects as it was at the boundary."""
        if id(value) in self._schedules:
            return self._schedules[id(value)]
        state = value.state_dict()
        groups = self._groups.get(id(value))
        if groups is not None:
            if len(groups) != len(state["param_groups"]):
                raise NotHeld("an optimizer has other groups of parameters than at the last finished step")
            held = [{**now, **then} for now, then in zip(state["param_groups"], groups, strict=True)]
            return {**state, "param_groups": held}
        return containers.map_leaves(state, self._as_it_was) if self._copied else state

    def _as_it_was(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(value, torch.Tensor):
            return value
        return self._copied.get(key_of(value), value)


def _tensors_of(group: dict[str, Any]) -> list[Any]:
    """Return the tensors among an optimizer's settings, such as a learning rate."""
    return [value for value in group.values() if hasattr(value, "detach")]
