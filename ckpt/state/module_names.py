"""What torch's modules hold, and its names, without a call of their state_dict(), which gathers under FSDP1."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from resilio_hpc.ckpt.state import containers
from resilio_hpc.ckpt.state.paths import joined

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)(?:\.|$)")

_ALL_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_flat_param)\."
)


def unwrapped(name: str) -> str:
    """Return a name of a parameter without wrappers, also such that a module of one's own may be named like."""
    return _ALL_WRAPPERS.sub("", name)


def clean_name(name: str) -> str:
    """Return the name that a parameter or module has without wrappers around its modules."""
    return _WRAPPERS.sub("", name).removesuffix(".")


def parameter_names(modules: Iterable[tuple[tuple[Any, ...], Any]], optimizer: Any) -> list[str] | None:
    """Return the names of an optimizer's parameters in ``modules`` (paths and modules); None where one has no name."""
    names: dict[int, str] = {}
    for path, module in modules:
        of_module = joined(path)
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), f"{of_module}/{unwrapped(name)}")
    found = [names.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"]]
    return [name for name in found if name is not None] if None not in found else None


def modules_in(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the modules in a nest of containers, with their paths."""
    if hasattr(state, "named_parameters"):
        yield path, state
    for key, item in containers.parts(state):
        yield from modules_in(item, (*path, key))


def fsdp_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the FSDP1 modules in a module, with their names; nothing where it is not in use."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and hasattr(model, "named_modules"):
        yield from (item for item in model.named_modules() if isinstance(item[1], fsdp.FullyShardedDataParallel))


def persistent_buffers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the buffers that a module's state has, with their names."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
