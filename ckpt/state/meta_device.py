"""Torch tensors without memory, on the meta device: a restore gives them memory before it fills them."""

from __future__ import annotations

import sys
from typing import Any

from resilio_hpc.core.errors import UsageError


def is_meta(value: Any) -> bool:
    """Return whether it is a torch tensor without memory, on the meta device."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor) and value.device.type == "meta"


def give_memory(value: Any) -> Any:
    """Allocate memory for a tensor on the meta device, content not set, seen by all that refer to it.

    It is on torch's default device (the CPU where that is the meta device), or that of a DTensor's mesh. Return what it
    was, for ``exchange`` to undo it.
    Raises UsageError for a tensor that torch cannot exchange.
    """
    import torch

    mesh = getattr(value, "device_mesh", None)
    device = torch.get_default_device() if mesh is None else torch.device(mesh.device_type)
    if device.type == "meta":  # a restore within torch.device("meta")
        device = torch.device("cpu")
    with torch.no_grad():
        made = torch.empty_like(value, device=device)
    if isinstance(value, torch.nn.Parameter):
        made = torch.nn.Parameter(made, value.requires_grad)
    try:
        exchange(value, made)
    except RuntimeError as error:
        raise UsageError(
            f"a tensor on the meta device cannot be given memory ({error}); use to_empty() first"
        ) from error
    return made


def exchange(one: Any, other: Any) -> None:
    """Exchange two tensors, for all that refer to them. Raises RuntimeError where torch cannot do that."""
    import torch

    torch.utils.swap_tensors(one, other)  # type: ignore[no-untyped-call]


def state_on_meta(module: Any, name: str) -> Any:
    """Return the state_dict of a module that has tensors on the meta device, with those tensors themselves.

    None for other modules. Raises UsageError for a buffer there that is not in the state: it would never be filled.
    """
    if not any(map(is_meta, (*module.parameters(), *module.buffers()))):
        return None
    state = module.state_dict(keep_vars=True)
    kept = set(map(id, state.values()))
    for path, buffer in module.named_buffers():
        if is_meta(buffer) and id(buffer) not in kept:
            raise UsageError(
                f"{name}: the buffer {path} is on the meta device, and no checkpoint holds what is not "
                "persistent; make it again on a device before the restore"
            )
    return state
