"""A decoder-only transformer by its numbers: exact parameter counts, FLOPs per token. CARD-7.

Read from presets (``presets``), Hugging Face's config.json (``huggingface_config``) or Megatron's arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from resilio_hpc.autoparallel.model.families import family
from resilio_hpc.autoparallel.model.transformer import Transformer
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable

LARGEST = {"layers": 100_000, "hidden": 2**20, "ffn": 2**24, "vocab": 2**28, "seq": 2**28, "experts": 2**16}
"""Far above any model: what is larger is a mistake."""


class NotUniform(UsageError):
    """A model is no decoder of equal layers."""


@dataclass(frozen=True)
class TransformerModel:
    """``ffn``: width of a dense MLP, ``expert_ffn`` of one expert, ``shared_ffn`` of all shared experts together.

    What is 0: ``kv_heads`` as many as heads, ``head_dim`` hidden / heads, ``value_dim`` head_dim, ``expert_ffn`` ffn,
    ``embedding_width`` hidden. ``dense_layers``: layers of a mixture of experts that have a dense MLP.
    ``positions``: rows of a learned position embedding. ``query_rank``, ``kv_rank``, ``rope_dim``: multi-head latent
    attention (DeepSeek, arXiv:2405.04434), where head_dim is that of a query. ``norms``: of width hidden, in a layer.
    ``qk_norm_whole``: norms of queries and keys over all heads at once; ``sinks``: a learned logit per head beside the
    keys; ``window``: keys that a query may see in every second layer (0: all in every layer).
    """

    name: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    gated: bool = False
    tied: bool = False
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    positions: int = 0
    embedding_width: int = 0
    query_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    norms: int = 2
    norm_bias: bool = False
    final_norm: bool = True
    embedding_norm: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    sinks: bool = False
    window: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    router_bias: bool = False
    shared_gate: bool = False
    parallel_mlp: bool = False

    def __post_init__(self) -> None:
        meaning = {
            "kv_heads": self.heads,
            "head_dim": self.hidden // max(self.heads, 1),
            "expert_ffn": self.ffn if self.experts else 0,
            "embedding_width": self.hidden,
        }
        for name, value in meaning.items():
            object.__setattr__(self, name, getattr(self, name) or value)
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)
        _check(self)

    # -- parameters --------------------------------------------------------------------------------------------------

    @property
    def norm_parameters(self) -> int:
        return self.hidden * (1 + self.norm_bias)

    @property
    def attention_parameters(self) -> int:
        """Return the parameters of one layer's attention, its norms included."""
        width, values = self.heads * self.head_dim, self.heads * self.value_dim
        out = values * self.hidden + self.out_bias * self.hidden
        if self.kv_rank:
            return self._latent_parameters + out
        kv = self.kv_heads * (self.head_dim + self.value_dim)
        qkv = (self.hidden + self.qkv_bias) * (width + kv)
        norms = self.qk_norm * 2 * self.head_dim + self.qk_norm_whole * (width + self.kv_heads * self.head_dim)
        return qkv + out + norms + self.sinks * self.heads

    @property
    def _latent_parameters(self) -> int:
        width, rank = self.heads * self.head_dim, self.query_rank
        query = self.hidden * rank + rank + rank * width if rank else self.hidden * width
        down = self.hidden * (self.kv_rank + self.rope_dim) + self.kv_rank
        up = self.kv_rank * self.heads * (self.head_dim - self.rope_dim + self.value_dim)
        return query + down + up

    def mlp_parameters(self, width: int) -> int:
        """Return the parameters of an MLP of this width."""
        matrices = 2 + self.gated
        return matrices * self.hidden * width + self.mlp_bias * ((1 + self.gated) * width + self.hidden)

    @property
    def dense_layer_parameters(self) -> int:
        return self.attention_parameters + self.norms * self.norm_parameters + self.mlp_parameters(self.ffn)

    @property
    def moe_layer_parameters(self) -> int:
        """Return the parameters of a layer with experts; those of a dense layer without any."""
        return self._moe_layer(self.experts) if self.experts else self.dense_layer_parameters

    def _moe_layer(self, experts: int) -> int:
        router = self.experts * (self.hidden + self.router_bias) + self.shared_gate * self.hidden
        shared = self.mlp_parameters(self.shared_ffn) if self.shared_ffn else 0
        outside = self.attention_parameters + self.norms * self.norm_parameters
        return outside + router + shared + experts * self.mlp_parameters(self.expert_ffn)

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def embedding_parameters(self) -> int:
        """Tokens and positions, a norm after them, and what widens a narrow embedding."""
        widening = self.hidden * self.embedding_width if self.embedding_width != self.hidden else 0
        rows = self.vocab * self.embedding_width + self.positions * self.hidden
        return rows + widening + self.embedding_norm * self.norm_parameters

    @property
    def head_parameters(self) -> int:
        """Return the parameters of the last norm and the head; a tied head has none of its own."""
        narrowing = self.hidden * self.embedding_width if self.embedding_width != self.hidden else 0
        matrix = 0 if self.tied else self.vocab * self.embedding_width
        return matrix + narrowing + self.final_norm * self.norm_parameters + self.head_bias * self.vocab

    @property
    def parameters(self) -> int:
        """Return the exact number of parameters; a tied one counts once."""
        return self._with_layers(self.moe_layer_parameters)

    @property
    def active_parameters(self) -> int:
        """Return the parameters that one token passes through: ``topk`` of the experts."""
        return self._with_layers(self._moe_layer(self.topk) if self.experts else self.dense_layer_parameters)

    def _with_layers(self, moe_layer: int) -> int:
        dense = self.layers - self.moe_layers
        layers = dense * self.dense_layer_parameters + self.moe_layers * moe_layer
        return self.embedding_parameters + layers + self.head_parameters

    # -- FLOPs -------------------------------------------------------------------------------------------------------

    @property
    def attention_weights(self) -> int:
        """Return the entries of the matrices that multiply a token in one layer's attention."""
        width, values = self.heads * self.head_dim, self.heads * self.value_dim
        if not self.kv_rank:
            return self.hidden * (width + self.kv_heads * (self.head_dim + self.value_dim) + values)
        norms = self.kv_rank + self.query_rank
        return self._latent_parameters - norms + values * self.hidden

    def core_flops(self, seq: int) -> int:
        """Of one token's attention to ``seq`` keys in one layer, forward; masked keys count, as in the field."""
        return 2 * seq * self.heads * (self.head_dim + self.value_dim)

    def mlp_weights(self, width: int) -> int:
        return (2 + self.gated) * self.hidden * width

    def layer_flops(self, seq: int, moe: bool = False) -> int:
        """Return the FLOPs of one token in one layer, forward."""
        weights = self.attention_weights
        if moe:
            router = self.experts * self.hidden + self.shared_gate * self.hidden
            weights += router + self.mlp_weights(self.shared_ffn) + self.topk * self.mlp_weights(self.expert_ffn)
        else:
            weights += self.mlp_weights(self.ffn)
        return 2 * weights + self.core_flops(seq)

    @property
    def embedding_flops(self) -> int:
        """Return the FLOPs of one token, forward: 0 except for a narrow embedding."""
        return 2 * self.hidden * self.embedding_width if self.embedding_width != self.hidden else 0

    @property
    def head_flops(self) -> int:
        """Return the FLOPs of one token, forward."""
        return 2 * self.vocab * self.embedding_width + self.embedding_flops

    def flops_per_token(self, seq: int = 0) -> int:
        """Forward and backward (twice the forward), nothing computed again; ``seq`` 0: the model's own."""
        length = seq or self.seq
        dense = self.layers - self.moe_layers
        layers = dense * self.layer_flops(length) + self.moe_layers * self.layer_flops(length, moe=True)
        return 3 * (self.embedding_flops + layers + self.head_flops)


def _check(model: TransformerModel) -> None:
    for field in fields(model):
        value = getattr(model, field.name)
        if field.type == "int":
            least = 1 if field.name in ("layers", "hidden", "heads", "ffn", "vocab", "seq") else 0
            most = LARGEST.get(field.name, 2**28)
            if type(value) is not int or not least <= value <= most:
                raise UsageError(
                    f"model {printable(model.name, 60)}: {field.name} is {_short(value)}, not {least} to {most}"
                )
    for wrong, what in (
        (model.heads % model.kv_heads, f"{model.heads} heads cannot share {model.kv_heads} kv_heads evenly"),
        (model.head_dim < 1, f"hidden {model.hidden} is too small for {model.heads} heads"),
        (model.topk > model.experts, f"topk {model.topk} of {model.experts} experts"),
        (model.experts and not model.topk, f"{model.experts} experts, but topk is 0"),
        (model.dense_layers > model.layers, f"dense_layers {model.dense_layers} of {model.layers} layers"),
        (model.rope_dim and model.rope_dim > model.head_dim, f"rope_dim {model.rope_dim} of head_dim {model.head_dim}"),
    ):
        if wrong:
            raise UsageError(f"model {printable(model.name, 60)}: {what}")


def _short(value: object) -> str:
    too_long = isinstance(value, int) and value.bit_length() > 256  # Python refuses to print thousands of digits
    return "a number of many digits" if too_long else printable(repr(value), 40)


def uniform(model: TransformerModel, seq: int = 0) -> Transformer:
    """Return the uniform transformer of the cost model. ``seq``: tokens of a sequence, 0 for the model's own.

    Latent attention is costed as one head of keys with a width that keeps the number of parameters.
    """
    latent = model.kv_rank > 0
    width = max(1, round(model.attention_weights / (2 * model.hidden * (model.heads + 1))))
    return Transformer(
        name=model.name,
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        ffn=model.ffn,
        vocab=model.vocab,
        seq=seq or model.seq,
        kv_heads=1 if latent else model.kv_heads,
        head_dim=width if latent else model.head_dim,
        gated=model.gated,
        tied=model.tied,
        experts=model.experts,
        topk=model.topk,
        expert_ffn=model.expert_ffn,
        shared_ffn=model.shared_ffn,
        dense_layers=model.dense_layers,
        window=model.window,
        **family(model.name),
    )
