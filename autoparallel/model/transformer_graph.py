"""The operator graph of a described transformer, where no module can be traced: embedding, layers, head, loss."""

from __future__ import annotations

from dataclasses import dataclass, field

from resilio_hpc.autoparallel.model.graph import Operator, OperatorGraph, Parameter, Value
from resilio_hpc.autoparallel.model.model_description import TransformerModel
from resilio_hpc.core.errors import UsageError

EMBEDDING = 0  # the first parameter, which a tied head uses too


def transformer_graph(
    model: TransformerModel, micro_batch: int = 1, seq: int = 0, bytes_per_value: int = 2
) -> OperatorGraph:
    """Return the graph of one micro-batch of sequences of ``seq`` tokens (0: the model's own).

    Parameters and FLOPs are the model's. Activations and parameters have ``bytes_per_value``. Raises UsageError.
    """
    length = seq or model.seq
    if micro_batch < 1 or length < 1:
        raise UsageError(f"a micro-batch of {micro_batch} sequences of {length} tokens: there must be at least 1")
    builder = _Builder(model, micro_batch * length, length, bytes_per_value)
    stream = builder.add("embedding", model.embedding_flops, model.embedding_parameters, model.hidden, [])
    for layer in range(model.layers):
        stream = _layer(builder, f"h.{layer}", stream, bool(model.experts) and layer >= model.dense_layers)
    norm = model.final_norm * model.norm_parameters
    stream = builder.add("norm", 0, norm, model.hidden, [stream])
    tied = (EMBEDDING,) if model.tied else ()
    head = builder.add("head", model.head_flops, model.head_parameters - norm, model.vocab, [stream], tied)
    builder.add("loss", 0, 0, 0, [head])
    return builder.graph()


def _layer(builder: _Builder, name: str, stream: int, moe: bool) -> int:
    """Add a layer; return the operator that makes its result."""
    model, norm = builder.model, builder.model.norm_parameters
    values = model.heads * model.value_dim
    before = builder.add(f"{name} norm", 0, min(model.norms, 1) * norm, model.hidden, [stream])
    out_weights = values * model.hidden
    out_parameters = out_weights + model.out_bias * model.hidden
    width = model.heads * model.head_dim + model.kv_heads * (model.head_dim + model.value_dim)
    qkv_flops = 2 * (model.attention_weights - out_weights)
    qkv = builder.add(f"{name} qkv", qkv_flops, model.attention_parameters - out_parameters, width, [before])
    core = builder.add(f"{name} attention", model.core_flops(builder.seq), 0, values, [qkv])
    out = builder.add(f"{name} out", 2 * out_weights, out_parameters, model.hidden, [core])
    residual = [stream, out]
    middle = stream if model.parallel_mlp else builder.add(f"{name} add", 0, 0, model.hidden, residual)
    between = builder.add(f"{name} mlp norm", 0, max(model.norms - 1, 0) * norm, model.hidden, [middle])
    mlp = (_experts if moe else _mlp)(builder, name, between)
    return builder.add(f"{name} add", 0, 0, model.hidden, [*(residual if model.parallel_mlp else [middle]), mlp])


def _mlp(builder: _Builder, name: str, stream: int) -> int:
    model, into = builder.model, 1 + builder.model.gated
    up_weights, bias = into * model.hidden * model.ffn, model.mlp_bias
    up = builder.add(f"{name} up", 2 * up_weights, up_weights + bias * into * model.ffn, into * model.ffn, [stream])
    activation = builder.add(f"{name} activation", 0, 0, model.ffn, [up])
    down = model.hidden * model.ffn
    return builder.add(f"{name} down", 2 * down, down + bias * model.hidden, model.hidden, [activation])


def _experts(builder: _Builder, name: str, stream: int) -> int:
    model = builder.model
    router = model.experts * model.hidden + model.shared_gate * model.hidden
    biases = model.router_bias * model.experts
    chosen = builder.add(f"{name} router", 2 * router, router + biases, model.experts, [stream])
    flops = 2 * (model.topk * model.mlp_weights(model.expert_ffn) + model.mlp_weights(model.shared_ffn))
    shared = model.mlp_parameters(model.shared_ffn) if model.shared_ffn else 0
    held = model.experts * model.mlp_parameters(model.expert_ffn) + shared
    return builder.add(f"{name} experts", flops, held, model.hidden, [stream, chosen])


@dataclass
class _Builder:
    model: TransformerModel
    tokens: int
    seq: int
    bytes_per_value: int
    operators: list[Operator] = field(default_factory=list)
    parameters: list[Parameter] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    readers: list[list[int]] = field(default_factory=list)

    def add(
        self, name: str, flops: int, parameters: int, width: int, inputs: list[int], shared: tuple[int, ...] = ()
    ) -> int:
        """Add an operator with its FLOPs per token, parameters, and values per token; return its index.

        Gives its index.
        """
        index = len(self.operators)
        for maker in inputs:
            self.readers[maker].append(index)
        own: tuple[int, ...] = ()
        if parameters:
            own = (len(self.parameters),)
            self.parameters.append(Parameter(name, parameters, parameters * self.bytes_per_value))
        self.operators.append(Operator(name, flops * self.tokens, 2 * flops * self.tokens, (*shared, *own)))
        self.widths.append(width)
        self.readers.append([])
        return index

    def graph(self) -> OperatorGraph:
        size = self.tokens * self.bytes_per_value
        made = zip(self.widths, self.readers, strict=True)
        values = tuple(Value(i, tuple(readers), width * size) for i, (width, readers) in enumerate(made) if readers)
        return OperatorGraph(self.model.name, tuple(self.operators), values, tuple(self.parameters))
