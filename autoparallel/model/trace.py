"""Any torch.nn.Module as an operator graph, on the CPU and without memory for its tensors (RES-19, step 1).

First through torch.export, which keeps operators as the user wrote them; where that refuses, the forward pass runs with
fake tensors and what it calls is recorded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from resilio_hpc.autoparallel.model.fake_model import fake_inputs, faked, parameters_of
from resilio_hpc.autoparallel.model.graph import OperatorGraph
from resilio_hpc.autoparallel.model.trace_dispatch import from_dispatch
from resilio_hpc.autoparallel.model.trace_errors import cannot_build, cannot_trace
from resilio_hpc.autoparallel.model.trace_export import Refused, from_export
from resilio_hpc.core.errors import UsageError

Model = torch.nn.Module | Callable[[], torch.nn.Module]


def trace(
    model: Model, inputs: Sequence[Any], keywords: Mapping[str, Any] | None = None, *, export: bool = True
) -> OperatorGraph:
    """The operators of ``model(*inputs, **keywords)``, with what a backward pass adds.

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
            except Refused:
                pass
        try:
            graph = from_dispatch(name, module, args, kwargs, parameters, mode)
        except Exception as error:
            raise cannot_trace(name, error) from error
    if not graph.operators:
        raise UsageError(f"{name}: nothing that it computes depends on its parameters and inputs")
    return graph


def trace_made(make: Callable[[], Any], where: str) -> OperatorGraph:
    """The same of what ``make()`` gives: (module, inputs), or (module, inputs, keywords). ``where``: for errors.

    It is called without memory for its tensors. Raises UsageError.
    """
    made = _without_memory(make)
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], torch.nn.Module):
        raise UsageError(f"{where} must return (module, inputs), or (module, inputs, keywords)")
    module, inputs, keywords = (*made, {}) if len(made) == 2 else made
    inputs = inputs if isinstance(inputs, tuple | list) else (inputs,)
    if not isinstance(keywords, Mapping):
        raise UsageError(f"{where}: keywords must be a dictionary, not a {type(keywords).__name__}")
    return trace(module, inputs, keywords)


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
