"""An operator graph from one forward pass with fake tensors: for models that torch.export refuses."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop_count

from resilio_hpc.autoparallel.model.graph import OperatorGraph, Parameter
from resilio_hpc.autoparallel.model.operator_recorder import RecordedOperator, Recorder

BUILT_IN = ("aten", "prims", "prim", "_operator", "builtins", "math")
HEAVY = ("linalg_", "_linalg", "_fft", "fft_", "_grouped_mm", "_cdist")  # some of these have no formula


def tensors_in(*nested: Any) -> list[torch.Tensor]:
    """Return the tensors in nested values, in order."""
    return [leaf for leaf in tree_flatten(nested)[0] if isinstance(leaf, torch.Tensor)]


def has_no_formula(operator: Any) -> bool:
    """Return whether its FLOPs are unknown rather than 0."""
    name = operator_name(operator)
    heavy = name.startswith(HEAVY)
    return (heavy or namespace(operator) not in BUILT_IN) and packet_of(operator) not in flop_registry


def namespace(operator: Any) -> str:
    return str(getattr(operator, "namespace", "builtins"))


def operator_name(operator: Any) -> str:
    """Return ``linear`` for ``aten.linear.default``; with its library where it is not torch's own."""
    name = str(getattr(packet_of(operator), "__name__", operator))
    own = namespace(operator)
    return name if own in BUILT_IN else f"{own}::{name}"


def attention_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``masked`` and ``head_size`` of attention; nothing for another operator."""
    queries = tensors_in(args[:1])
    if "attention" not in operator_name(operator) or not queries or queries[0].dim() < 3:
        return {}
    schema = getattr(operator, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema else []
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return {"masked": bool(given.get("is_causal", False)), "head_size": int(queries[0].shape[-1])}


def packet_of(operator: Any) -> Any:
    return getattr(operator, "overloadpacket", operator)


def counted(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the FLOPs of an operator with its own formula, else 0."""
    formula = flop_registry.get(packet_of(operator))
    if formula is None and "scaled_dot_product" in operator_name(operator):  # those of CPUs have none
        return int(sdpa_flop_count(*(t.shape for t in args[:3])))  # type: ignore[no-untyped-call]
    return int(formula(*args, **kwargs, out_val=out)) if formula else 0


class CompositeFlops:
    """FLOPs of operators that torch makes of smaller ones (linear, matmul, einsum); each signature is run once."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def __call__(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        if len([tensor for tensor in tensors_in(args, kwargs) if tensor.is_floating_point()]) < 2:
            return 0  # a product has two factors
        key = (operator, *_signature(args, kwargs))
        if key not in self._known:
            self._known[key] = _run(operator, args, kwargs)
        return self._known[key]


def _signature(args: Any, kwargs: Any) -> Iterator[Hashable]:
    leaves, shape = tree_flatten((args, kwargs))
    yield str(shape)
    for leaf in leaves:
        yield (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)


def _run(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the FLOPs by a run on the meta device, which computes nothing; an operator that cannot run there has 0."""
    args, kwargs = tree_map_only(torch.Tensor, _meta, (args, kwargs))
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            operator(*args, **kwargs)
    except (RuntimeError, NotImplementedError):
        return 0
    return int(counter.get_total_flops())


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def from_dispatch(
    name: str, module: torch.nn.Module, args: Any, kwargs: Any,
    parameters: Mapping[str, tuple[int, Parameter, bool]], mode: FakeTensorMode,
) -> OperatorGraph:  # fmt: skip
    """Return the model's operators. Raises errors of the model's code or of a missing fake implementation."""
    recorder = Recorder(list(dict(sorted((index, about) for index, about, _ in parameters.values())).values()))
    watch = _Watch(recorder)
    for path, parameter in module.named_parameters(remove_duplicate=False):
        index, _, trainable = parameters[path]
        recorder.parameter(watch.key(parameter), index, trainable)
    for buffer in module.buffers():
        recorder.constant(watch.key(buffer))
    for tensor in tensors_in(args, kwargs):
        recorder.batch(watch.key(tensor), tensor.requires_grad)
    with module_paths(module, watch.path), mode, watch:
        result = module(*args, **kwargs)
    return recorder.graph(name, [watch.key(tensor) for tensor in tensors_in(result)], watch.uncounted)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes every operator to the recorder.

    Tensors are kept, so that no other gets the identity of one that was freed.
    """

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
    ) -> RecordedOperator:
        schema, gradient = func._schema, torch.is_grad_enabled() and "detach" not in func.__name__
        infos = [one.alias_info for one in schema.returns]
        given = dict(zip([a.name for a in schema.arguments], args, strict=False)) | kwargs
        changed = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        writes = [self.key(tensor) for name in changed for tensor in tensors_in(given.get(name))]
        fresh = [tensor for tensor in made if id(tensor) not in writes]
        return RecordedOperator(
            self.path[-1] if self.path else "", operator_name(func), counted(func, args, kwargs, out),
            [id(tensor) for tensor in inputs],
            [(self.key(tensor), tensor.nbytes, gradient and tensor.is_floating_point()) for tensor in fresh],
            operands=[id(tensor) for tensor in inputs if tensor.dim() >= 2], writes=writes,
            view=any(info is not None and not info.is_write for info in infos) or "_unsafe_view" in func.__name__,
            **attention_of(func, args, kwargs),
        )  # fmt: skip


@contextmanager
def module_paths(module: torch.nn.Module, running: list[str]) -> Iterator[None]:
    """Keep the path of the module that runs at the end of ``running``."""
    names = {id(part): path for path, part in module.named_modules()}

    def enter(part: torch.nn.Module, inputs: Any) -> None:
        running.append(names.get(id(part), running[-1] if running else ""))

    def leave(part: torch.nn.Module, inputs: Any, output: Any) -> None:
        running.pop()

    handles = [
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class ExportRefused(Exception):
    """torch.export does not accept this model, or its result cannot be read here."""


def from_export(
    name: str, module: torch.nn.Module, args: Any, kwargs: Any, parameters: Mapping[str, tuple[int, Parameter, bool]]
) -> OperatorGraph:
    """Return the recorded operators. Raises Refused."""
    try:
        with _silent():
            program = torch.export.export(module, args, kwargs, strict=False)
    except Exception as error:
        raise ExportRefused(str(error)) from error
    nodes = list(program.graph.nodes)
    if any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in nodes):
        raise ExportRefused("control flow with graphs inside")
    if any(isinstance(size, torch.SymInt) for n in nodes for t in tensors_in(n.meta.get("val")) for size in t.shape):
        raise ExportRefused("shapes that depend on values")
    recorder = Recorder(list(dict(sorted((index, about) for index, about, _ in parameters.values())).values()))
    for node, spec in zip(
        [n for n in nodes if n.op == "placeholder"], program.graph_signature.input_specs, strict=True
    ):
        if spec.kind is InputKind.PARAMETER:
            index, _, trainable = parameters[str(spec.target)]
            recorder.parameter(node, index, trainable)
        elif spec.kind is InputKind.USER_INPUT:
            value = node.meta.get("val")
            recorder.batch(node, isinstance(value, torch.Tensor) and value.requires_grad)
        else:
            recorder.constant(node)
    flops, uncounted = CompositeFlops(), dict[str, None]()
    for node in nodes:
        if node.op == "call_function":
            recorder.see(_seen(node, flops))
            if has_no_formula(node.target):
                uncounted[operator_name(node.target)] = None
    return recorder.graph(name, nodes[-1].all_input_nodes, uncounted)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Silence torch, which prints half a graph, and logs, where it refuses: the error is one line of this package."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _seen(node: Node, flops: CompositeFlops) -> RecordedOperator:
    args, kwargs = map_arg((node.args, node.kwargs), lambda inner: inner.meta.get("val"))
    schema = getattr(node.target, "_schema", None)
    work = flops(node.target, args, kwargs) if schema else 0
    inputs = node.all_input_nodes
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write] if schema else []
    return RecordedOperator(
        _module(node), operator_name(node.target), work, inputs, [_output(node, _makes_gradient(node))],
        operands=[i for i in inputs if _is_matrix(i)], writes=_arguments(node, schema, written),
        view=_is_view(schema) if schema else node.target.__name__ == "getitem",  # type: ignore[union-attr]
        **attention_of(node.target, args, kwargs),
    )  # fmt: skip


def _module(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return str(path).split("@")[0]


def _output(node: Node, gradient: bool) -> tuple[Node, int, bool]:
    tensors = tensors_in(node.meta.get("val"))
    return node, sum(tensor.nbytes for tensor in tensors), gradient


def _makes_gradient(node: Node) -> bool:
    floating = any(tensor.is_floating_point() for tensor in tensors_in(node.meta.get("val")))
    return floating and "detach" not in operator_name(node.target)


def _is_matrix(node: Node) -> bool:
    return any(tensor.dim() >= 2 for tensor in tensors_in(node.meta.get("val")))


def _is_view(schema: Any) -> bool:
    return any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)


def _arguments(node: Node, schema: Any, names: Sequence[str]) -> list[Node]:
    """Return the arguments of a call with these names."""
    if not names:
        return []
    given = dict(zip([argument.name for argument in schema.arguments], node.args, strict=False)) | dict(node.kwargs)
    return [given[name] for name in names if isinstance(given.get(name), Node)]
