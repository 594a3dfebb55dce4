"""A torch module as the decoder of equal layers that the search wants: its numbers, from its parameters' shapes.

The traced graph says how wide attention is. The description is checked against the module's parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from resilio_hpc.autoparallel.model.graph import OperatorGraph
from resilio_hpc.autoparallel.model.model_description import NotUniform, TransformerModel
from resilio_hpc.autoparallel.model.trace import made_module, trace

Shapes = tuple[tuple[int, ...], ...]
HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead", "heads")
WITHIN = 0.1  # of the module's parameters, what the description may miss
INSTEAD = "describe it by a preset, config.json or Megatron's arguments; resilio plan FILE.py:NAME costs any module"


def described_module(make: Callable[[], Any], where: str) -> TransformerModel:
    """Return the decoder that ``make()`` builds, as ``trace_made`` takes it. ``where``: for errors.

    Raises NotUniform where it is no stack of equal layers of attention and MLP, UsageError where it cannot be traced.
    """
    module, inputs, keywords = made_module(make, where)
    tokens, seq = _tokens((*inputs, *keywords.values()), where)
    layers, shapes, inside = _layers(module, where)
    hidden = _hidden(shapes, where)
    graph = trace(module, inputs, keywords)  # takes longest, so it comes last
    outside = [tuple(p.shape) for p in module.parameters() if id(p) not in inside]
    embeddings = [shape for shape in outside if len(shape) == 2 and shape[1] == hidden]
    vocab = max((shape[0] for shape in embeddings), default=0)
    ffn, gated, width, keys = _widths(shapes, hidden, _attention(graph, layers, tokens, seq) or hidden, where)
    heads = _heads(module, width)
    tied = sum(shape[0] == vocab for shape in embeddings) < 2
    model = TransformerModel(
        type(module).__name__, layers, hidden, heads, ffn, vocab, seq, kv_heads=max(1, keys * heads // width),
        head_dim=width // heads, gated=gated, tied=tied,
    )  # fmt: skip
    off = model.parameters / graph.parameter_count - 1
    if abs(off) > WITHIN:
        raise _refused(where, f"as one, it would have {off:+.0%} of its {graph.parameter_count:,} parameters")
    return model


def _refused(where: str, why: str) -> NotUniform:
    return NotUniform(f"{where} is no decoder of equal layers: {why}: {INSTEAD}")


def _tokens(inputs: Sequence[Any], where: str) -> tuple[int, int]:
    """Return the tokens of the micro-batch, and of a sequence."""
    for one in inputs:
        if isinstance(one, torch.Tensor) and one.dim() >= 2:
            return one.shape[0] * one.shape[1], one.shape[1]
    raise _refused(where, "none of its inputs is a tensor of sequences (micro-batch, tokens)")


def _layers(module: torch.nn.Module, where: str) -> tuple[int, Shapes, set[int]]:
    """Return how often the part that repeats most does so, the shapes of its parameters, and all these parameters."""
    best: tuple[int, Shapes, set[int]] = 0, (), set()
    for part in module.modules():
        children = [(tuple(tuple(p.shape) for p in child.parameters()), child) for child in part.children()]
        common = Counter(shapes for shapes, _ in children if sum(len(shape) == 2 for shape in shapes) > 2)
        for shapes, times in common.items():
            if times > 1 and times * _count(shapes) > best[0] * _count(best[1]):
                layers = [child for own, child in children if own == shapes]
                best = times, shapes, {id(p) for layer in layers for p in layer.parameters()}
    if best[0] < 2:
        raise _refused(where, "no part with matrices repeats in it")
    return best


def _count(shapes: Shapes) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def _matrices(shapes: Shapes) -> list[tuple[int, int]]:
    return [(shape[0], shape[1]) for shape in shapes if len(shape) == 2]


def _hidden(shapes: Shapes, where: str) -> int:
    """Return the width that most matrices of a layer have on one side."""
    sides = Counter(side for shape in _matrices(shapes) for side in set(shape))
    side, times = sides.most_common(1)[0]
    if times < len(_matrices(shapes)):
        raise _refused(where, "not every matrix of a layer has the same width on one side")
    return side


def _attention(graph: OperatorGraph, layers: int, tokens: int, seq: int) -> int:
    """Return the width of the queries of a layer by the FLOPs of its attention; 0 where none is one operator."""
    flops = sum(op.forward_flops for op in graph.operators if "scaled_dot_product" in op.name)
    return round(flops / (4 * tokens * seq * layers))


def _widths(shapes: Shapes, hidden: int, width: int, where: str) -> tuple[int, bool, int, int]:
    """Return the MLP's width, whether it is gated, and the widths of queries and of keys.

    Without the MLP's matrices and the one behind attention, those of queries, keys and values are left.
    """
    others = Counter(out * into // hidden for out, into in _matrices(shapes))  # of each matrix, its other side
    for down in sorted(others, reverse=True):
        for gated, mlp in ((True, (2 * down, down)), (True, (down,) * 3), (False, (down,) * 2)):
            if all(others[side] >= times for side, times in Counter([*mlp, width]).items()):
                left = others - Counter([*mlp, width])
                keys, rest = divmod(sum(left.elements()) - width, 2)
                if not rest and 0 < keys <= width:
                    return down, gated, width, keys
    sizes = ", ".join(map(str, sorted(others.elements())))
    raise _refused(where, f"its matrices, of {sizes} by {hidden}, are not those of attention and MLP")


def _heads(module: torch.nn.Module, width: int) -> int:
    """Return the number of heads by the usual names of attributes; without one, heads of 128 or 64."""
    for part in module.modules():
        for name in HEADS:
            found = getattr(part, name, None)
            if type(found) is int and found > 0 and width % found == 0:
                return found
    return width // next(size for size in (128, 64, width) if width % size == 0)
