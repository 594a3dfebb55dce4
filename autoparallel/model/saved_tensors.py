"""What autograd keeps of any torch module for its backward pass, operator by operator, without memory for its tensors.

One forward pass with fake tensors tells autograd's own hooks of every tensor that is kept. A storage counts once, with
the module that ran when it was kept first; parameters, buffers and inputs are there anyway.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten

from resilio_hpc.autoparallel.model.graph import OperatorGraph
from resilio_hpc.autoparallel.model.trace import cannot_trace, fake_inputs, faked, made_module, trace
from resilio_hpc.autoparallel.model.trace_dispatch import module_paths, tensors_in
from resilio_hpc.autoparallel.model.traced_model import TracedModel
from resilio_hpc.core.errors import UsageError

ModuleInputs = tuple[Any, ...]


def traced_model(make: Callable[[], Any], where: str) -> TracedModel:
    """Return the operators and activations of what ``make()`` gives, as ``trace_made`` takes it. Raises UsageError.

    The first tensor of the inputs says how many samples they are (its first size), and, if it is of whole numbers, how
    many tokens a sample has (its second).
    """
    module, inputs, keywords = made_module(make, where)
    graph = trace(module, inputs, keywords)
    first = next((one for one in tensors_in((inputs, dict(keywords))) if one.dim()), None)
    if first is None or not first.shape[0]:
        raise UsageError(f"{where}: none of its inputs is a tensor of samples (micro-batch, …)")
    tokens = int(first.shape[1]) if first.dim() == 2 and not first.is_floating_point() else 0
    return TracedModel(graph, int(first.shape[0]), tokens, _by_operator(graph, kept_bytes(module, inputs, keywords)))


def kept_bytes(module: torch.nn.Module, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes that autograd keeps, by the path of the module that runs. Raises UsageError."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    path, found = list[str](), Counter[str]()
    seen = dict[int, torch.UntypedStorage]()  # kept, so that no other storage gets the same identity

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen[storage._cdata] = storage
            found[path[-1] if path else ""] += storage.nbytes()
        return tensor

    with faked(module, mode), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args, kwargs = fake_inputs(mode, tuple(inputs)), fake_inputs(mode, dict(keywords))
        there = [*module.parameters(), *module.buffers(), *tree_flatten((args, kwargs))[0]]
        for tensor in (one for one in there if isinstance(one, torch.Tensor)):
            seen[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        try:
            with module_paths(module, path), mode, saved_tensors_hooks(keep, lambda tensor: tensor):
                module(*args, **kwargs)
        except Exception as error:
            raise cannot_trace(type(module).__name__, error) from error
    return dict(found)


def _by_operator(graph: OperatorGraph, kept: Mapping[str, int]) -> NDArray[np.int64]:
    """Spread what a module keeps over its operators, by the bytes that they write.

    A module without operators of its own (its values exist everywhere) leaves them to the one around it.
    """
    places = dict[str, list[int]]()
    for index, operator in enumerate(graph.operators):
        places.setdefault(operator.module, []).append(index)
    saved = np.zeros(len(graph.operators))
    for path, size in kept.items():
        while path and path not in places:
            path = path.rpartition(".")[0]
        rows = places.get(path) or [0]
        made = graph.made_bytes[rows] + 1.0
        saved[rows] += size * made / made.sum()
    return saved.astype(np.int64)
