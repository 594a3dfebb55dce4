"""The record of a trace, operator by operator, as an ``OperatorGraph``.

A tensor is identified by any key of the tracer's. A view stands for its tensor; a view of a part is a value of its own,
since a later stage needs that part only. A value made without FLOPs from parameters alone, or from batch and constants
alone, exists in every stage: it is no operator.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from resilio_hpc.autoparallel.model.graph import Operator, OperatorGraph, Parameter, Value

ATTENTION = ("attention",)
NEVER_GIVEN = ("rand", "dropout", "bernoulli", "normal", "multinomial")  # each stage would draw another value


@dataclass(frozen=True)
class RecordedOperator:
    """One traced operator. ``operands``: keys of the matrices that its FLOPs multiply.

    ``outputs``: key and size in bytes, and whether it may need a gradient. ``view``: outputs look at the first input.
    ``writes``: keys of inputs that are changed in place. ``masked``, ``head_size``: as in ``Operator``.
    """

    module: str
    kind: str
    flops: int
    inputs: Sequence[Hashable]
    outputs: Sequence[tuple[Hashable, int, bool]]
    operands: Sequence[Hashable] = ()
    view: bool = False
    writes: Sequence[Hashable] = ()
    masked: bool = False
    head_size: int = 0


@dataclass
class _Tensor:
    """A tensor. ``value``: index of what is sent; None where every stage has it.

    ``whole``: the tensor of which it is a part.
    """

    size_bytes: int = 0
    value: int | None = None
    parameters: frozenset[int] = frozenset()
    of_batch: bool = False
    gradient: bool = False
    whole: _Tensor | None = None


@dataclass
class Recorder:
    parameters: Sequence[Parameter]
    _tensors: dict[Hashable, _Tensor] = field(default_factory=dict)
    _operators: list[Operator] = field(default_factory=list)
    _made: list[tuple[int, int]] = field(default_factory=list)
    _readers: list[list[int]] = field(default_factory=list)

    def parameter(self, key: Hashable, index: int, trainable: bool) -> None:
        self._tensors[key] = _Tensor(parameters=frozenset([index]), gradient=trainable)

    def constant(self, key: Hashable) -> None:
        """Record a buffer: every stage that needs it has it."""
        self._tensors[key] = _Tensor()

    def batch(self, key: Hashable, gradient: bool = False) -> None:
        """Record a part of the batch, or a value without inputs."""
        self._tensors[key] = _Tensor(of_batch=True, gradient=gradient)

    def knows(self, key: Hashable) -> bool:
        return key in self._tensors

    def see(self, seen: RecordedOperator) -> None:
        """Record one operator, in the order of the program."""
        inputs = [self._tensors[key] for key in seen.inputs if key in self._tensors]
        if not inputs:
            for key, size, _ in seen.outputs:
                self._tensors[key] = _Tensor(size, of_batch=True)
        elif seen.view and not seen.flops and not seen.writes:
            for key, size, _ in seen.outputs:
                self._tensors[key] = self._view(inputs[0], size)
        elif self._is_given(seen, inputs):
            self._give(seen, inputs)
        else:
            self._operate(seen, inputs)

    def _view(self, tensor: _Tensor, size: int) -> _Tensor:
        if tensor.value is None or size >= tensor.size_bytes:
            return tensor
        value = self._value(self._made[tensor.value][0], size)
        return replace(tensor, size_bytes=size, value=value, whole=tensor)

    @staticmethod
    def _is_given(seen: RecordedOperator, inputs: Iterable[_Tensor]) -> bool:
        everywhere = all(tensor.value is None for tensor in inputs)
        looks_up = any(tensor.parameters for tensor in inputs) and any(tensor.of_batch for tensor in inputs)
        random = any(word in seen.kind for word in NEVER_GIVEN)
        return everywhere and not seen.flops and not looks_up and not random

    def _give(self, seen: RecordedOperator, inputs: Sequence[_Tensor]) -> None:
        parameters = frozenset[int]().union(*(tensor.parameters for tensor in inputs))
        gradient, of_batch = any(t.gradient for t in inputs), any(t.of_batch for t in inputs)
        made = [(key, _Tensor(size, None, parameters, of_batch, gradient and may)) for key, size, may in seen.outputs]
        self._tensors |= dict(made)

    def _operate(self, seen: RecordedOperator, inputs: Sequence[_Tensor]) -> None:
        index = len(self._operators)
        for value in {tensor.value for tensor in inputs} - {None}:
            self._readers[value or 0].append(index)
        used = sorted(frozenset[int]().union(*(tensor.parameters for tensor in inputs)))
        name = f"{seen.module} {seen.kind}".strip()
        about = (seen.masked, seen.head_size)
        self._operators.append(Operator(name, seen.flops, self._backward(seen), tuple(used), *about))
        gradient = any(tensor.gradient for tensor in inputs)
        for key, size, may in seen.outputs:
            self._tensors[key] = _Tensor(size, self._value(index, size), gradient=gradient and may)
        for key in seen.writes:
            if key in self._tensors:
                self._written(self._tensors[key], index, gradient)

    def _written(self, tensor: _Tensor | None, index: int, gradient: bool) -> None:
        """Record a write: all views show it, and a part's whole is made again as well."""
        while tensor is not None:
            tensor.value = self._value(index, tensor.size_bytes)
            tensor.gradient = tensor.gradient or gradient
            tensor = tensor.whole

    def _backward(self, seen: RecordedOperator) -> int:
        """As many FLOPs again for each operand whose gradient is needed; attention has four products for two."""
        derived = sum(self._tensors[key].gradient for key in seen.operands if key in self._tensors)
        if any(word in seen.kind for word in ATTENTION):
            return 2 * seen.flops if derived else 0
        return min(derived, 2) * seen.flops

    def _value(self, producer: int, size: int) -> int:
        self._made.append((producer, size))
        self._readers.append([])
        return len(self._made) - 1

    def graph(self, name: str, results: Iterable[Hashable], uncounted: Mapping[str, None]) -> OperatorGraph:
        """Return the graph. ``results``: keys of the model's results, which leave from the last stage."""
        last = len(self._operators) - 1
        for key in results:
            tensor = self._tensors.get(key)
            if tensor and tensor.value is not None and self._made[tensor.value][0] < last:
                self._readers[tensor.value].append(last)
        values = (
            Value(producer, tuple(dict.fromkeys(readers)), size)
            for (producer, size), readers in zip(self._made, self._readers, strict=True)
            if readers
        )
        return OperatorGraph(
            name, tuple(self._operators), tuple(values), tuple(self.parameters), uncounted=tuple(uncounted)
        )
