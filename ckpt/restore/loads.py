"""Loads objects that have ``load_state_dict``, one after the other; if one refuses, all get their former state back.

Each is called once: a data loader may go forward by as much as it is told. Only a module that has more than tensors, or
its own way to load them, first loads its own tensors with the saved values beside them, so that it refuses in time.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from resilio_hpc.ckpt.restore.module_state import is_torchs
from resilio_hpc.ckpt.state import saved_optimizer
from resilio_hpc.ckpt.state.containers import holds_scalars_only
from resilio_hpc.ckpt.state.overlap import is_optimizer
from resilio_hpc.ckpt.state.paths import place
from resilio_hpc.ckpt.state.tensors import is_tensor
from resilio_hpc.ckpt.state.tree import has_state
from resilio_hpc.core.errors import CorruptCheckpoint, LayoutMismatch

_SMALL_BYTES = 64 << 10


class Undo:
    """The way back to the former state. Of large tensors it keeps only which object had which."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []

    def add(self, step: Callable[[], None]) -> None:
        """Add ``step``, to be done before those that were added earlier."""
        self._steps.append(step)

    def roll_back(self) -> None:
        """Undo what was loaded, once."""
        while self._steps:
            self._steps.pop()()

    def remember(self, live: Any) -> None:
        """Remember the state of an object, and of objects in it: attributes, containers, small tensors."""
        seen: set[int] = set()
        waiting = [live]
        # torch's optimizers replace their tensors, of which there may be thousands
        tensors_too = not is_optimizer(live)
        while waiting:
            value = waiting.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, dict | list | set | deque):
                self._remember_container(value)
                if not holds_scalars_only(value):
                    waiting += value.values() if isinstance(value, dict) else value
            elif isinstance(value, tuple):
                waiting += value
            elif is_tensor(value):
                if tensors_too and value.nbytes <= _SMALL_BYTES:
                    self.remember_tensor(value)
            elif is_optimizer(value) and value is not live:
                waiting.append(value.param_groups)  # schedulers change it
            elif has_state(value) and not _is_module(value):
                self._remember_object(value, waiting)

    def _remember_object(self, value: Any, waiting: list[Any]) -> None:
        if isinstance(getattr(value, "__dict__", None), dict):
            waiting.append(vars(value))
        else:
            before = copy.deepcopy(value.state_dict())
            self.add(lambda: value.load_state_dict(before))

    def _remember_container(self, value: Any) -> None:
        kept = dict(value) if isinstance(value, dict) else list(value)

        def put_back() -> None:
            value.clear()
            if isinstance(value, dict | set):
                value.update(kept)
            else:
                value.extend(kept)

        self.add(put_back)

    def remember_tensor(self, value: Any) -> None:
        """Remember the content of a tensor."""
        with contextlib.suppress(RuntimeError):  # a tensor without memory
            kept = value.detach().clone() if hasattr(value, "detach") else value.copy()
            put = value.detach().copy_ if hasattr(value, "detach") else lambda old: value.__setitem__(..., old)
            self.add(lambda: put(kept))


def _is_module(value: Any) -> bool:
    return hasattr(value, "named_buffers") and hasattr(value, "named_parameters")


@dataclass(frozen=True)
class _Load:
    live: Any
    path: tuple[Any, ...]
    build: Callable[[], Any]
    fills_tensors: bool = False
    overwrites: list[Any] | None = None

    def run(self, state: Any = None) -> Any:
        """Load it; ``state``: in place of that of ``build``.

        Raises LayoutMismatch, with the place, for any exception of the object; CorruptCheckpoint where it says so.
        """
        state = self.build() if state is None else state
        try:
            self.live.load_state_dict(state)
        except CorruptCheckpoint as error:  # an older checkpoint may be whole
            raise CorruptCheckpoint(f"{place(self.path)}: {error}") from error
        except Exception as error:
            why = " ".join(str(error).split()) or repr(error)  # torch's is of many lines
            raise LayoutMismatch(f"{place(self.path)}: {type(self.live).__name__} refused its state: {why}") from error
        return state


@dataclass
class Loads:
    """The objects to load, in the order of the state."""

    _objects: list[_Load] = field(default_factory=list)
    _modules: list[_Load] = field(default_factory=list)

    def add(self, live: Any, path: tuple[Any, ...], build: Callable[[], Any], fills_tensors: bool) -> None:
        """Add an object that is no module.

        ``build``: makes its state, after the new tensors are read. ``fills_tensors``: it may write to large tensors in
        place, which cannot be undone, so it comes after the others.
        """
        self._objects.append(_Load(live, path, build, fills_tensors))

    def add_module(
        self, live: Any, path: tuple[Any, ...], build: Callable[[], Any], overwrites: list[Any] | None
    ) -> None:
        """Add a module; ``build``: makes its state, of its own tensors.

        ``overwrites``: it gets others, too, which are new, and its code may copy them into these tensors; None: not so.
        """
        self._modules.append(_Load(live, path, build, overwrites=overwrites))

    def load_objects(self, undo: Undo) -> None:
        """Load all but the tensors of modules. Raises LayoutMismatch; ``undo`` then knows what has changed."""
        for load in sorted(self._objects, key=lambda load: load.fills_tensors):
            undo.remember(load.live)
            settings = [dict(group) for group in load.live.param_groups] if is_optimizer(load.live) else []
            state = load.run()
            saved_optimizer.keep_settings(load.live, settings, place(load.path))
            if is_optimizer(load.live) and isinstance(state, dict) and isinstance(state.get("state"), dict):
                saved_optimizer.keep_as_saved(load.live, state)
        for load in self._modules:
            if load.overwrites is not None or _may_refuse(load.live):
                for tensor in load.overwrites or ():
                    undo.remember_tensor(tensor)
                undo.add(partial(_put_back, load, load.live.state_dict()))
                load.run()

    def load_modules(self) -> None:
        """Load modules, whose tensors have their values by now. Raises LayoutMismatch."""
        for load in self._modules:
            load.run()


def _put_back(load: _Load, before: Any) -> None:
    with contextlib.suppress(LayoutMismatch):  # a module that refuses its own state still has it
        load.run(before)


def _may_refuse(module: Any) -> bool:
    """Return whether it has state beside its tensors, or its own code to save or load it."""
    import torch

    plain = torch.nn.Module
    for part in module.modules():
        kind = type(part)
        own_ways = (kind.load_state_dict, kind._load_from_state_dict, kind.state_dict, kind._save_to_state_dict)
        if kind.set_extra_state is not plain.set_extra_state or not all(is_torchs(way) for way in own_ways):
            return True
        hooks = (part._load_state_dict_pre_hooks, part._load_state_dict_post_hooks, part._state_dict_hooks)
        if not all(is_torchs(hook) for some in hooks for hook in some.values()):
            return True
    return False
