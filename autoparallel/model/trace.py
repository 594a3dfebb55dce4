"""Any torch.nn.Module as an operator graph, on the CPU and without memory for its tensors (RES-19, step 1).

First through torch.export, which keeps operators as the user wrote them; where that refuses, the forward pass runs with
fake tensors and what it calls is recorded.
"""

from __future__ import annotations

import contextlib
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import tree_map_only

from resilio_hpc.autoparallel.model.graph import OperatorGraph, Parameter
from resilio_hpc.autoparallel.model.trace_dispatch import ExportRefused, from_dispatch, from_export
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable


def parameters_of(module: torch.nn.Module) -> dict[str, tuple[int, Parameter, bool]]:
    """Return, for each of its names, a parameter's index, the parameter, whether it is trained.

    Tied ones share an index.
    """
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
    """Make all of the module's tensors fake CPU ones for the block, tied ones still tied; then restore them."""
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
    """Return nested inputs with fake tensors of the CPU; other values stay."""
    return tree_map_only(torch.Tensor, lambda tensor: _fake(mode, tensor), inputs)


def _fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode:
        return tensor
    with mode:
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)


INSTEAD = "describe the model by a preset, config.json or Megatron's arguments"
_NOT_USERS = {Path(__file__).parents[2], Path(torch.__file__).parent, Path(contextlib.__file__).parent}
_VALUES = "the values of a tensor, of which a trace knows only the shape"


def cannot_trace(name: str, error: Exception) -> UsageError:
    """Return the error for one of the forward pass."""
    what, remedy = _reason(error)
    return UsageError(f"{name} cannot be traced: {what}{_where(error)}: {remedy}")


def cannot_build(error: Exception) -> UsageError:
    """Return the error for one during construction without memory for tensors."""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException) or "meta tensors" in str(error):
        what, remedy = f"it reads {_VALUES}", "compute that with Python numbers, or give a module that is made already"
    else:
        what, remedy = _text(error), "give a module that is made already"
    return UsageError(f"the model cannot be made without memory for its tensors: {what}{_where(error)}: {remedy}")


def _reason(error: Exception) -> tuple[str, str]:
    if isinstance(error, DynamicOutputShapeException):
        return (
            f"{error.func} makes a tensor whose shape depends on {_VALUES}",
            f"use a fixed capacity with a mask instead (for experts: tokens per expert), or {INSTEAD}",
        )
    if isinstance(error, DataDependentOutputException | GuardOnDataDependentSymNode):
        return (
            f"which way it goes depends on {_VALUES}",
            f"use torch.where, or a Python number given to the model when it is made, or {INSTEAD}",
        )
    if isinstance(error, UnsupportedOperatorException):
        return f"{error.func} says nothing about its result's shape", "torch.library.register_fake can tell it"
    missing = re.search(r"(\w+::\w+)[^\n]*(?:fake impl|no kernel|meta)", str(error), re.IGNORECASE)
    if missing:
        return f"{missing[1]} says nothing about its result's shape", "torch.library.register_fake can tell it"
    return _text(error), f"it must run with these inputs on the CPU; or {INSTEAD}"


def _text(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable(f"{type(error).__name__}: {lines[0] if lines else ''}", 240)


def _where(error: Exception) -> str:
    """Return the last line of the user's own code that was running."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if not _NOT_USERS.intersection(path.parents):
            return f" (at {printable(path.name, 60)}:{frame.lineno}: {printable(frame.line or '', 80)})"
    return ""


Model = torch.nn.Module | Callable[[], torch.nn.Module]


def trace(
    model: Model, inputs: Sequence[Any], keywords: Mapping[str, Any] | None = None, *, export: bool = True
) -> OperatorGraph:
    """Return the operators of ``model(*inputs, **keywords)``, with what a backward pass adds.

    ``model``: a module on any device, meta included, or a function that makes one: it is called without memory for its
    tensors. ``inputs``: one micro-batch; only shapes and types count. ``export`` False: fake tensors at once.
    The model is left as it was. Raises UsageError, which says what cannot be traced, where, and what to do instead.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    module = model if isinstance(model, torch.nn.Module) else _built(model)
    name = type(module).__name__
    parameters = parameters_of(module)
    with faked(module, mode), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args, kwargs = fake_inputs(mode, tuple(inputs)), fake_inputs(mode, dict(keywords or {}))
        if export:
            try:
                return from_export(name, module, args, kwargs, parameters)
            except ExportRefused:
                pass
        try:
            graph = from_dispatch(name, module, args, kwargs, parameters, mode)
        except Exception as error:
            raise cannot_trace(name, error) from error
    if not graph.operators:
        raise UsageError(f"{name}: nothing that it computes depends on its parameters and inputs")
    return graph


def trace_made(make: Callable[[], Any], where: str) -> OperatorGraph:
    """Return the same for the result of ``make()``: (module, inputs), or (module, inputs, keywords).

    ``where``: for errors.

    It is called without memory for its tensors. Raises UsageError.
    """
    return trace(*made_module(make, where))


def made_module(make: Callable[[], Any], where: str) -> tuple[torch.nn.Module, tuple[Any, ...], Mapping[str, Any]]:
    """Return what ``make()`` gives, called without memory for tensors. Raises UsageError."""
    made = _without_memory(make)
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], torch.nn.Module):
        raise UsageError(f"{where} must return (module, inputs), or (module, inputs, keywords)")
    module, inputs, keywords = (*made, {}) if len(made) == 2 else made
    inputs = inputs if isinstance(inputs, tuple | list) else (inputs,)
    if not isinstance(keywords, Mapping):
        raise UsageError(f"{where}: keywords must be a dictionary, not a {type(keywords).__name__}")
    return module, tuple(inputs), keywords


def _built(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    module = _without_memory(make)
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"what was to make the model made a {type(module).__name__}, not a torch.nn.Module")
    return module


def _without_memory(make: Callable[[], Any]) -> Any:
    try:
        with torch.device("meta"):
            return make()
    except Exception as error:
        raise cannot_build(error) from error
