"""The state of a torch optimizer on its way back: to its own parameters, in the dtypes in which it was saved.

torch numbers parameters and stores nothing of their shapes, and it casts state to the dtype of its parameter. Here
state follows names where both sides have them, shapes are checked, and state saved as float32 stays float32.
It is laid out in memory as its parameter is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any

from resilio_hpc.ckpt.state.containers import SEQUENCES, alike, alike_dict
from resilio_hpc.ckpt.state.module_names import unwrapped
from resilio_hpc.ckpt.state.slab import is_dtensor
from resilio_hpc.ckpt.state.tensors import copy_into, is_tensor
from resilio_hpc.core.errors import LayoutMismatch

_LIKE_PARAMETERS = frozenset({
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta",
    "ax", "prev",
})  # fmt: skip
"""State of torch's own optimizers that has the shape of its parameter. Older checkpoints do not hold shapes."""

_NOT_OF_A_KIND = frozenset({
    "param_names", "initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum",
})  # fmt: skip
"""In the groups of any optimizer: names of parameters, and what schedules of torch leave there."""


def parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters in the order of torch's numbers."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def arranged(
    live: Any, saved: dict[Any, Any], where: str, names: tuple[list[str] | None, list[str] | None] = (None, None)
) -> tuple[dict[Any, Any], list[int]]:
    """Return a saved ``state_dict()`` with its parameters in the order of ``live``, by their names.

    Also, for each parameter of ``live``, the number that it was saved with. ``names``: those of the parameters of
    ``live`` and of ``saved`` in modules, which count where an optimizer was not given any. Unchanged where one side has
    no names, or where modules have others. Raises LayoutMismatch, beginning with ``where``, for other names that were
    given, or other groups.
    """
    groups = saved.get("param_groups")
    same = list(range(len(parameters_of(live))))
    if not isinstance(groups, list) or not isinstance(saved.get("state"), dict):
        return saved, same
    mine, theirs = _names(live.param_groups), _names(groups)
    are_given = mine is not None and theirs is not None
    if not are_given:
        mine, theirs = _shared_out(names[0], live.param_groups), _shared_out(names[1], groups)
    if mine is None or theirs is None or mine == theirs:
        return saved, same
    all_mine, all_theirs = list(chain.from_iterable(mine)), list(chain.from_iterable(theirs))
    if len(set(all_mine)) != len(all_mine) or len(set(all_theirs)) != len(all_theirs):
        return saved, same
    if set(all_mine) != set(all_theirs):
        if not are_given:
            return saved, same
        missing = [name for name in all_mine if name not in set(all_theirs)][:5]
        more = [name for name in all_theirs if name not in set(all_mine)][:5]
        raise LayoutMismatch(
            f"{where}: the optimizer and the checkpoint have other parameters; only in the optimizer: {missing}, only "
            f"in the checkpoint: {more}"
        )
    found = {frozenset(group): number for number, group in enumerate(theirs)}
    order = []
    for group in mine:
        if frozenset(group) not in found:
            raise LayoutMismatch(
                f"{where}: the optimizer's parameter groups are others than in the checkpoint: none there has the "
                f"parameters {group[:5]}{'…' if len(group) > 5 else ''} and no others"
            )
        order.append(found[frozenset(group)])
    number_of = dict(zip(all_theirs, (number for group in groups for number in group["params"]), strict=True))
    numbers = [number_of[name] for name in all_mine]
    return _renumbered(saved, [groups[number] for number in order], numbers), numbers


def _shared_out(names: list[str] | None, groups: Sequence[Any]) -> list[list[str]] | None:
    """Return names in the order of torch's numbers for each group; None where there are more or fewer parameters."""
    if names is None or len(names) != sum(len(group["params"]) for group in groups):
        return None
    rest = iter(names)
    return [list(islice(rest, len(group["params"]))) for group in groups]


def _names(groups: Sequence[Any]) -> list[list[str]] | None:
    """Return the names of the parameters of each group, without prefixes of wrappers; None where they have none."""
    found = []
    for group in groups:
        names = group.get("param_names")
        if not isinstance(names, list | tuple) or len(names) != len(group["params"]):
            return None
        found.append([unwrapped(str(name)) for name in names])
    return found


def _renumbered(saved: dict[Any, Any], groups: list[Any], numbers: list[int]) -> dict[Any, Any]:
    made, begin = [], 0
    for group in groups:
        positions = range(begin, begin + len(group["params"]))
        moved_group = {**group, "params": list(positions)}
        if "param_names" in group:
            there = dict(zip(group["params"], group["param_names"], strict=True))
            moved_group["param_names"] = [there[numbers[position]] for position in positions]
        made.append(moved_group)
        begin += len(positions)
    state = saved["state"]
    moved = {position: state[number] for position, number in enumerate(numbers) if number in state}
    of_none = {key: value for key, value in state.items() if key not in set(numbers)}  # of the optimizer as a whole
    return {**saved, "state": moved | of_none, "param_groups": made}


def check_shapes(
    live: Any,
    saved: dict[Any, Any],
    shapes: Sequence[Sequence[int] | None] | None,
    shape_of: Callable[[Any], tuple[int, ...] | None],
    where: str,
) -> None:
    """Raise LayoutMismatch for state of a parameter of another shape.

    ``saved``: arranged; ``shapes``: of the parameters when they were saved, in the order of ``live``, None if not
    known; ``shape_of``: returns a saved tensor's shape, None for other values.
    """
    parameters = parameters_of(live)
    is_torchs = type(live).__module__.startswith("torch.optim")
    for number, values in saved["state"].items():
        if type(number) is not int or number >= len(parameters) or not isinstance(values, dict):
            continue
        shape = tuple(parameters[number].shape)
        known = shapes[number] if shapes is not None and number < len(shapes) else None
        if known is not None and tuple(known) != shape:
            raise LayoutMismatch(
                f"{where}: the checkpoint holds the state of a parameter of shape {list(known)}, parameter {number} of "
                f"the optimizer has shape {list(shape)}"
            )
        for name in _LIKE_PARAMETERS & values.keys() if is_torchs else ():
            held = shape_of(values[name])
            if held is not None and held != shape:
                raise LayoutMismatch(
                    f"{where}: the checkpoint holds {name} of shape {list(held)}, parameter {number} of the optimizer "
                    f"has shape {list(shape)}"
                )


def keep_settings(live: Any, before: list[dict[str, Any]], where: str) -> None:
    """Give an optimizer's groups, after its load, the settings that were not saved: a later version of it has more.

    ``before``: its groups as they were; none for other objects. Raises LayoutMismatch, beginning with ``where``, where
    settings were saved that it does not know, and others of its own were not: it is of another kind.
    """
    for group, former in zip(live.param_groups if before else (), before, strict=False):
        missing = {key: former[key] for key in live.defaults if key in former and key not in group}
        unknown = [key for key in group if key not in former and key not in _NOT_OF_A_KIND]
        if missing and unknown:
            raise LayoutMismatch(
                f"{where}: the checkpoint holds the state of another kind of optimizer than {type(live).__name__}: "
                f"it has {unknown[:3]}, and lacks {[*missing][:3]}"
            )
        group.update(missing)


def keep_as_saved(live: Any, saved: dict[Any, Any]) -> None:
    """Give an optimizer, after its load, the state that torch has changed, as it was saved. ``saved``: what it loaded.

    torch casts tensors, and takes text and containers of other types apart. Tensors are laid out in memory as their
    parameter is, where they have its shape: fused steps go through the memory of both.
    """
    parameters = parameters_of(live)
    for number, values in saved["state"].items():
        if type(number) is int and number < len(parameters) and parameters[number] in live.state:
            parameter = parameters[number]
            live.state[parameter] = _as_saved(live.state[parameter], values, parameter)


def _as_saved(now: Any, then: Any, parameter: Any) -> Any:
    if is_tensor(now) and is_tensor(then):
        return _tensor_as_saved(now, then, parameter)
    if isinstance(now, dict) and isinstance(then, dict):
        for key in now.keys() & then.keys():
            now[key] = _as_saved(now[key], then[key], parameter)
        is_as_saved = type(now) is type(then) or now.keys() != then.keys()
        return now if is_as_saved else alike_dict(then, {key: now[key] for key in then})
    if type(now) is type(then) and type(now) in SEQUENCES and len(now) == len(then):
        return alike(then, [_as_saved(mine, its, parameter) for mine, its in zip(now, then, strict=True)])
    return then if type(now) is type(then) is str else now


def _tensor_as_saved(now: Any, then: Any, parameter: Any) -> Any:
    if not hasattr(then, "device") or now.shape != then.shape:
        return now
    found = now if now.dtype == then.dtype else then.to(now.device)
    if found.shape != parameter.shape or found.stride() == parameter.stride() or is_dtensor(parameter):
        return found
    import torch

    made = torch.empty_like(parameter.detach(), dtype=found.dtype, device=found.device)
    if made.stride() == found.stride():
        return found
    copy_into(made, found)
    return made
