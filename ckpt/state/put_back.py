"""Brings a living state back to the boundary at which it was held: what is large stays where it is, and as it is.

A process that enters another round with its model and optimizer needs no copy of them, where all ranks go on from the
step that it holds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from resilio_hpc.ckpt.state import containers, overlap, tensors
from resilio_hpc.ckpt.state.any_layout import AnyLayout
from resilio_hpc.ckpt.state.flat_slab import FlatSlab
from resilio_hpc.ckpt.state.held_state import HeldState, NotHeld
from resilio_hpc.ckpt.state.paths import joined
from resilio_hpc.ckpt.state.slab import Slab, slab_of
from resilio_hpc.ckpt.state.tree import has_state
from resilio_hpc.ckpt.state.watched import is_module, is_scaler, is_schedule, key_of

Build = Callable[[], Any]


def put_back(held: HeldState, state: Any) -> Any:
    """Return ``state`` as it was held: its own tensors, containers and objects, and no gradients.

    Raises NotHeld, and nothing is changed then, where it is another state, or has changed since.
    """
    held.flattened()
    build = _matched(state, held.state, (), held)
    _put_objects_back(held)
    return build()


def _put_objects_back(held: HeldState) -> None:
    """Bring torch's modules, optimizers and schedules back."""
    for live, then in held.copies():
        _fill(live, then)
    for one in held.watched.objects:
        groups = one.param_groups if overlap.is_optimizer(one) else [{"params": list(one.parameters())}]
        for group in groups:
            for parameter in group["params"]:
                parameter.grad = None  # as in a process that has just begun
    for optimizer, groups_then in held.groups():
        for group, before in zip(optimizer.param_groups, groups_then, strict=True):
            group.update(copy.deepcopy(before))


def _matched(live: Any, then: Any, path: tuple[Any, ...], held: HeldState) -> Build:
    """Return how to make what was held out of ``live``. Raises NotHeld where the two are not of one kind."""
    if is_module(live) or overlap.is_optimizer(live) or is_scaler(live) or is_schedule(live):
        if live is not then:
            raise NotHeld(f"{joined(path)} is another object now")
        schedule = held.schedule_of(live) if is_schedule(live) or is_scaler(live) else None
        return lambda: live if schedule is None else _loaded(live, schedule)
    if type(live) is AnyLayout:
        return _giving(live, _matched(live.as_in(then), then, path, held))
    if type(live) in (Slab, FlatSlab) or tensors.is_tensor(live):
        return _tensor(live, then, path)
    if containers.is_container(live):
        return _container(live, then, path, held)
    if has_state(live):
        return lambda: _loaded(live, then)
    return lambda: copy.deepcopy(then)


def _giving(live: Any, build: Build) -> Build:
    def made() -> Any:
        build()
        return live

    return made


def _tensor(live: Any, then: Any, path: tuple[Any, ...]) -> Build:
    live_slab, then_slab = (one if type(one) is FlatSlab else slab_of(one) for one in (live, then))
    mine = live_slab.tensor if live_slab is not None else live
    its = then_slab.tensor if then_slab is not None else then
    if (live_slab is None) != (then_slab is None) or not tensors.is_tensor(its) or mine.shape != its.shape:
        raise NotHeld(f"{joined(path)} is another tensor now")

    def build() -> Any:
        _fill(mine, its)
        return live

    return build


def _container(live: Any, then: Any, path: tuple[Any, ...], held: HeldState) -> Build:
    if type(live) is type(then) and containers.holds_scalars_only(live) and containers.holds_scalars_only(then):
        return lambda: _replaced(live, then)
    if type(live) is not type(then) or len(live) != len(then):
        raise NotHeld(f"{joined(path)} is another collection now")
    if isinstance(live, dict):
        if live.keys() != then.keys():
            raise NotHeld(f"{joined(path)} has other keys now")
        parts = {key: _matched(live[key], value, (*path, key), held) for key, value in then.items()}

        return lambda: containers.fill_dict(live, {key: build() for key, build in parts.items()})
    items = [_matched(mine, its, (*path, at), held) for at, (mine, its) in enumerate(zip(live, then, strict=True))]

    def build_sequence() -> Any:
        made = [build() for build in items]
        if isinstance(live, list):
            live[:] = made
            return live
        return containers.alike(live, made)

    return build_sequence


def _replaced(live: Any, then: Any) -> Any:
    if isinstance(live, dict):
        return containers.fill_dict(live, then)
    if isinstance(live, list):
        live[:] = then
        return live
    return copy.copy(then)


def _loaded(live: Any, state: Any) -> Any:
    live.load_state_dict(copy.deepcopy(state))
    return live


def _fill(live: Any, then: Any) -> None:
    if not hasattr(live, "detach"):
        live[...] = then
    elif key_of(live) != key_of(then):
        live.detach().copy_(then)
