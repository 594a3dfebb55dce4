"""The ``state_dict()`` of a torch module in a restore: what of it is the module's own tensors, to be filled in place.

The rest is given to the module new: extra state, tensors that its own code resizes when it loads them, and those of
other names, where it has code that knows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from resilio_hpc.ckpt.state import containers, meta_device
from resilio_hpc.ckpt.state.any_layout import AnyLayout
from resilio_hpc.ckpt.state.containers import NOTHING, alike_dict
from resilio_hpc.ckpt.state.flat_slab import FlatSlab
from resilio_hpc.ckpt.state.module_names import persistent_buffers, unwrapped
from resilio_hpc.ckpt.state.slab import is_dtensor, slab_of
from resilio_hpc.ckpt.state.tensors import is_tensor
from resilio_hpc.ckpt.state.tree import has_state


def own_tensors(
    module: Any, state: dict[str, Any], names: Iterable[str], fits: Callable[[str, Any], bool]
) -> tuple[dict[str, Any], list[Any] | None]:
    """Return ``state``, a module's ``state_dict()``, with these names, and NOTHING for what is not the module's own.

    Return also the module's tensors that are not in it, which its code may fill with what it gets new; None where
    nothing is new. ``fits``: returns whether the saved value of a name has the shape of a tensor.
    """
    named = dict(module.named_parameters(remove_duplicate=False)) | dict(persistent_buffers(module))
    memory = {_memory(tensor) for tensor in named.values()}
    parts = dict(module.named_modules())

    def own(name: str, value: Any) -> Any:
        if not is_tensor(value):
            return value if _holds_places(value) else NOTHING
        if slab_of(value) is not None or meta_device.is_meta(value):
            return value
        if name not in named and (not value.nbytes or _memory(value) not in memory):
            return NOTHING
        return value if fits(name, value) or not _resizes(parts.get(name.rpartition(".")[0])) else NOTHING

    made: dict[str, Any] = alike_dict(
        state, {name: own(name, state[name]) if name in state else NOTHING for name in names}
    )
    if not any(value is NOTHING for value in made.values()):
        return made, None
    filled = {_memory(value) for value in made.values() if is_tensor(value)}
    return made, [tensor for tensor in named.values() if _memory(tensor) not in filled]


def loads_other_names(module: Any) -> bool:
    """Return whether a module has its own code to load a state, which may know names that it does not have itself."""
    return any(
        not all(map(is_torchs, (type(part).load_state_dict, type(part)._load_from_state_dict)))
        or not all(map(is_torchs, part._load_state_dict_pre_hooks.values()))
        for part in module.modules()
    )


def is_torchs(function: Any) -> bool:
    """Return whether a function is torch's own."""
    return str(getattr(function, "__module__", "")).startswith("torch.")


def _memory(tensor: Any) -> int:
    """Return what is the same for all tensors in one piece of memory."""
    try:
        local = tensor.to_local() if is_dtensor(tensor) else tensor
        return int(local.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError, AttributeError):  # a kind without memory of its own, or numpy's
        return -1 - id(tensor)


def _holds_places(value: Any) -> bool:
    """Return whether a value has something in it that is restored where it is: an object, a part of a tensor."""
    if containers.is_container(value):
        return any(_holds_places(item) for _, item in containers.parts(value))
    if is_tensor(value):
        return slab_of(value) is not None
    return type(value) in (AnyLayout, FlatSlab) or slab_of(value) is not None or has_state(value)


def _resizes(part: Any) -> bool:
    """Return whether a module may give its tensors another shape when it loads them."""
    if part is None:
        return False
    own_way = type(part)._load_from_state_dict
    return bool(part._load_state_dict_pre_hooks) or not own_way.__module__.startswith("torch.nn.")


def by_names_of(state: dict[str, Any], saved: dict[Any, Any]) -> dict[Any, Any]:
    """Return a saved state by the names of ``state``, where these differ by wrappers around modules alone.

    Such are DistributedDataParallel and torch.compile.
    """
    if saved.keys() == state.keys() or not all(type(name) is str for name in (*state, *saved)):
        return saved
    mine = {unwrapped(name): name for name in state}
    theirs = {unwrapped(name): value for name, value in saved.items()}
    if mine.keys() != theirs.keys() or len(mine) != len(state) or len(theirs) != len(saved):
        return saved
    renamed: dict[Any, Any] = alike_dict(saved, {mine[name]: value for name, value in theirs.items()})
    versions, own_versions = getattr(saved, "_metadata", None), getattr(state, "_metadata", None)
    if versions is not None and own_versions is not None:  # by the names of modules
        known = {_module_name(name): version for name, version in versions.items()}
        found = {name: known.get(_module_name(name), version) for name, version in own_versions.items()}
        renamed._metadata = type(own_versions)(found)  # type: ignore[attr-defined]
    return renamed


def _module_name(name: str) -> str:
    return unwrapped(f"{name}." if name else "")
