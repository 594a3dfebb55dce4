"""A model and its inputs with fake tensors in the place of real ones: shapes and types, no memory, no arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from resilio_hpc.autoparallel.model.graph import Parameter


def parameters_of(module: torch.nn.Module) -> dict[str, tuple[int, Parameter, bool]]:
    """By every name that it has: its index, the parameter, whether it is trained. Tied ones share an index."""
    names: dict[int, list[str]] = {}
    first: dict[int, torch.nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        first[id(parameter)] = parameter
    found: dict[str, tuple[int, Parameter, bool]] = {}
    for index, (key, parameter) in enumerate(first.items()):
        about = Parameter(names[key][0], parameter.numel(), parameter.nbytes, tuple(names[key][1:]))
        found |= dict.fromkeys(names[key], (index, about, parameter.requires_grad))
    return found


@contextmanager
def faked(module: torch.nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Within it, all of the module's tensors are fake ones of the CPU, tied ones still tied; then it is as before."""
    fakes: dict[int, torch.Tensor] = {}
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            made = _fake(mode, tensor)
            parameter = isinstance(tensor, torch.nn.Parameter)
            fakes[id(tensor)] = torch.nn.Parameter(made, tensor.requires_grad) if parameter else made
        return fakes[id(tensor)]

    for part in module.modules():
        places: tuple[Any, ...] = (part._parameters, part._buffers, vars(part))
        for place in places:
            real = {name: value for name, value in place.items() if isinstance(value, torch.Tensor)}
            kept.append((place, real))
            place.update({name: fake(value) for name, value in real.items()})
    try:
        yield
    finally:
        for place, real in kept:
            place.update(real)


def fake_inputs(mode: FakeTensorMode, inputs: Any) -> Any:
    """Nested inputs with fake tensors of the CPU; what is no tensor stays."""
    return tree_map_only(torch.Tensor, lambda tensor: _fake(mode, tensor), inputs)


def _fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode:
        return tensor
    with mode:
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)
