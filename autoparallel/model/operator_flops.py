"""FLOPs of one traced operator, by torch's own formulas (torch.utils.flop_counter), which users may add to."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop_count

BUILT_IN = ("aten", "prims", "prim", "_operator", "builtins", "math")
HEAVY = ("linalg_", "_linalg", "_fft", "fft_", "_grouped_mm", "_cdist")  # of these some have no formula


def tensors_in(*nested: Any) -> list[torch.Tensor]:
    """The tensors in nested values, in order."""
    return [leaf for leaf in tree_flatten(nested)[0] if isinstance(leaf, torch.Tensor)]


def has_no_formula(operator: Any) -> bool:
    """Whether its FLOPs are unknown rather than 0."""
    name = operator_name(operator)
    heavy = name.startswith(HEAVY)
    return (heavy or namespace(operator) not in BUILT_IN) and packet_of(operator) not in flop_registry


def namespace(operator: Any) -> str:
    return str(getattr(operator, "namespace", "builtins"))


def operator_name(operator: Any) -> str:
    """``linear`` of ``aten.linear.default``; with its library where it is not torch's own."""
    name = str(getattr(packet_of(operator), "__name__", operator))
    own = namespace(operator)
    return name if own in BUILT_IN else f"{own}::{name}"


def packet_of(operator: Any) -> Any:
    return getattr(operator, "overloadpacket", operator)


def counted(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """FLOPs of an operator that has a formula of its own, else 0."""
    formula = flop_registry.get(packet_of(operator))
    if formula is None and "scaled_dot_product" in operator_name(operator):  # that of CPUs has none
        return int(sdpa_flop_count(*(t.shape for t in args[:3])))  # type: ignore[no-untyped-call]
    return int(formula(*args, **kwargs, out_val=out)) if formula else 0


class CompositeFlops:
    """FLOPs of operators that torch makes of smaller ones (linear, matmul, einsum), each signature looked at once."""

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
    """On the meta device, where nothing is computed; an operator that cannot run there has its own formula, or 0."""
    args, kwargs = tree_map_only(torch.Tensor, _meta, (args, kwargs))
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            operator(*args, **kwargs)
    except (RuntimeError, NotImplementedError):
        return 0
    return int(counter.get_total_flops())


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
