"""An operator graph from one forward pass with fake tensors: for models that torch.export refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from resilio_hpc.autoparallel.model.graph import OperatorGraph, Parameter
from resilio_hpc.autoparallel.model.operator_flops import counted, has_no_formula, operator_name, tensors_in
from resilio_hpc.autoparallel.model.operator_recorder import Recorder, Seen


def from_dispatch(
    name: str, module: torch.nn.Module, args: Any, kwargs: Any,
    parameters: Mapping[str, tuple[int, Parameter, bool]], mode: FakeTensorMode,
) -> OperatorGraph:  # fmt: skip
    """Raises what the model's code or a missing fake implementation raises."""
    recorder = Recorder(list(dict(sorted((index, about) for index, about, _ in parameters.values())).values()))
    watch = _Watch(recorder)
    for path, parameter in module.named_parameters(remove_duplicate=False):
        index, _, trainable = parameters[path]
        recorder.parameter(watch.key(parameter), index, trainable)
    for buffer in module.buffers():
        recorder.constant(watch.key(buffer))
    for tensor in tensors_in(args, kwargs):
        recorder.batch(watch.key(tensor), tensor.requires_grad)
    with _paths(module, watch), mode, watch:
        result = module(*args, **kwargs)
    return recorder.graph(name, [watch.key(tensor) for tensor in tensors_in(result)], watch.uncounted)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every operator to the recorder. Tensors are kept, so that no other takes the identity of one that went."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.path: list[str] = []
        self.uncounted: dict[str, None] = {}
        self._recorder = recorder
        self._kept: dict[int, torch.Tensor] = {}

    def key(self, tensor: torch.Tensor) -> int:
        self._kept[id(tensor)] = tensor
        return id(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs, made = tensors_in(args, kwargs), tensors_in(out)
        for tensor in inputs:
            if not self._recorder.knows(self.key(tensor)):
                self._recorder.constant(id(tensor))  # a tensor that the model holds outside of its buffers
        if has_no_formula(func):
            self.uncounted[operator_name(func)] = None
        if made and func.namespace != "prim":
            self._recorder.see(self._seen(func, args, kwargs, out, inputs, made))
        return out

    def _seen(
        self, func: Any, args: Any, kwargs: Any, out: Any, inputs: list[torch.Tensor], made: list[torch.Tensor]
    ) -> Seen:
        schema, gradient = func._schema, torch.is_grad_enabled() and "detach" not in func.__name__
        infos = [one.alias_info for one in schema.returns]
        given = dict(zip([a.name for a in schema.arguments], args, strict=False)) | kwargs
        changed = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        writes = [self.key(tensor) for name in changed for tensor in tensors_in(given.get(name))]
        fresh = [tensor for tensor in made if id(tensor) not in writes]
        return Seen(
            self.path[-1] if self.path else "", operator_name(func), counted(func, args, kwargs, out),
            [id(tensor) for tensor in inputs],
            [(self.key(tensor), tensor.nbytes, gradient and tensor.is_floating_point()) for tensor in fresh],
            operands=[id(tensor) for tensor in inputs if tensor.dim() >= 2], writes=writes,
            view=any(info is not None and not info.is_write for info in infos) or "_unsafe_view" in func.__name__,
        )  # fmt: skip


@contextmanager
def _paths(module: torch.nn.Module, watch: _Watch) -> Iterator[None]:
    """Keeps the path of the module that runs in ``watch.path``."""
    names = {id(part): path for path, part in module.named_modules()}

    def enter(part: torch.nn.Module, inputs: Any) -> None:
        watch.path.append(names.get(id(part), watch.path[-1] if watch.path else ""))

    def leave(part: torch.nn.Module, inputs: Any, output: Any) -> None:
        watch.path.pop()

    handles = [
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
