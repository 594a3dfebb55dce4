"""Megatron's argument list, as far as it tells the model's size. The other arguments are ignored."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from resilio_hpc.autoparallel.base.config_values import ConfigValues
from resilio_hpc.autoparallel.model.model_description import TransformerModel
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import printable

NUMBERS = (
    "num-layers", "hidden-size", "num-attention-heads", "ffn-hidden-size", "seq-length", "max-position-embeddings",
    "kv-channels", "num-query-groups", "vocab-size", "padded-vocab-size", "make-vocab-size-divisible-by",
    "tensor-model-parallel-size", "num-experts", "moe-router-topk", "moe-ffn-hidden-size",
    "moe-shared-expert-intermediate-size", "q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim",
    "v-head-dim",
)  # fmt: skip
WORDS = ("position-embedding-type", "normalization", "moe-layer-freq")
FLAGS = (
    "group-query-attention", "swiglu", "disable-bias-linear", "add-qkv-bias", "qk-layernorm", "multi-latent-attention",
    "untie-embeddings-and-output-weights", "moe-router-enable-expert-bias", "moe-shared-expert-gate", "squared-relu",
)  # fmt: skip
REFUSED = ("encoder-num-layers", "decoder-num-layers", "heterogeneous-layers-config-path", "hybrid-override-pattern")
WHERE = "Megatron's arguments"


def from_megatron(arguments: Sequence[str]) -> TransformerModel:
    """Return the model that Megatron-LM would build, with its defaults. Raises UsageError, which names the argument."""
    values = ConfigValues(WHERE, _read(arguments))
    for name in ("num-layers", "hidden-size", "num-attention-heads", "vocab-size"):
        _require(name, values, arguments)
    layers, hidden, heads = (values.whole(name) for name in ("num-layers", "hidden-size", "num-attention-heads"))
    gated, latent = values.flag("swiglu"), values.flag("multi-latent-attention")
    # Megatron's default width of a gated MLP: as many parameters as an ungated one of 4·hidden, a multiple of 64
    ffn = values.whole("ffn-hidden-size", int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden)
    biases = not values.flag("disable-bias-linear")
    groups = values.whole("num-query-groups", 1) if values.flag("group-query-attention") else 0
    seq = values.whole("seq-length", 2048)
    kind = values.text("position-embedding-type", "learned_absolute")
    experts = values.whole("num-experts", 0)
    channels = values.whole("kv-channels", 0)
    return TransformerModel(
        "megatron", layers, hidden, heads, ffn, _padded_vocab(values), seq,
        kv_heads=groups, head_dim=values.whole("qk-head-dim", 128) + _rope(values) if latent else channels,
        value_dim=values.whole("v-head-dim", 128) if latent else 0, rope_dim=_rope(values) if latent else 0,
        kv_rank=values.whole("kv-lora-rank", 32) if latent else 0,
        query_rank=values.whole("q-lora-rank", 0) if latent else 0,
        gated=gated, tied=not values.flag("untie-embeddings-and-output-weights"),
        positions=values.whole("max-position-embeddings", seq) if kind == "learned_absolute" else 0,
        norm_bias=values.text("normalization", "LayerNorm") == "LayerNorm", qk_norm=values.flag("qk-layernorm"),
        qkv_bias=biases or values.flag("add-qkv-bias"), out_bias=biases, mlp_bias=biases,
        experts=experts, topk=values.whole("moe-router-topk", 2) if experts else 0,
        expert_ffn=values.whole("moe-ffn-hidden-size", ffn) if experts else 0,
        shared_ffn=values.whole("moe-shared-expert-intermediate-size", 0), dense_layers=_dense(values, layers, experts),
        router_bias=values.flag("moe-router-enable-expert-bias"), shared_gate=values.flag("moe-shared-expert-gate"),
    )  # fmt: skip


def _read(arguments: Sequence[str]) -> dict[str, object]:
    """Return the given arguments, by name without dashes; the last one counts, as in argparse."""
    found: dict[str, object] = {}
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for index, word in enumerate(words):
        name = word.removeprefix("--").replace("_", "-") if word.startswith("--") else ""
        if name in REFUSED:
            raise UsageError(f"{WHERE}: --{name} describes layers that differ: give the model itself (--module)")
        if name in FLAGS:
            found[name] = True
        elif name in NUMBERS or name in WORDS:
            text = words[index + 1] if index + 1 < len(words) else ""
            found[name] = text if name in WORDS else _number(name, text)
    return found


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise UsageError(f"{WHERE}: --{name} {printable(repr(text), 40)} is not a whole number, 0 or more")
    return int(text)


def _require(name: str, values: ConfigValues, arguments: Sequence[str]) -> None:
    if name in values.data or (name == "vocab-size" and "padded-vocab-size" in values.data):
        return
    near = difflib.get_close_matches(f"--{name}", [word for word in arguments if word.startswith("--")], 1, 0.75)
    hint = f": did you mean it by {printable(near[0], 60)}?" if near else ""
    if name == "vocab-size" and not near:
        hint = ": Megatron takes it from the tokenizer; add it here"
    raise UsageError(f"{WHERE}: --{name} is missing{hint}")


def _rope(values: ConfigValues) -> int:
    return values.whole("qk-pos-emb-head-dim", 64)


def _padded_vocab(values: ConfigValues) -> int:
    """Rows are added until tensor-parallel ranks have equally many, a multiple of --make-vocab-size-divisible-by."""
    if "padded-vocab-size" in values.data:
        return values.whole("padded-vocab-size")
    multiple = values.whole("make-vocab-size-divisible-by", 128) * values.whole("tensor-model-parallel-size", 1)
    if not multiple:
        raise UsageError(f"{WHERE}: --make-vocab-size-divisible-by and --tensor-model-parallel-size must be 1 or more")
    return -(-values.whole("vocab-size") // multiple) * multiple


def _dense(values: ConfigValues, layers: int, experts: int) -> int:
    """Return the dense layers of ``--moe-layer-freq``: 1, or a pattern as ([0]*3+[1]*58)."""
    text = values.text("moe-layer-freq", "1").replace(" ", "")
    if not experts or text == "1":
        return 0
    pattern: list[int] = []
    for part in text.strip("()").split("+"):
        digit, _, times = part.partition("*")
        wrong = digit not in ("[0]", "[1]") or not (times.isascii() and times.isdigit() and len(times) < 6)
        if wrong or (digit == "[0]" and 1 in pattern):
            raise UsageError(
                f"{WHERE}: --moe-layer-freq {printable(text, 60)}: dense layers first is what is described"
            )
        pattern += [int(digit[1])] * int(times)
    if len(pattern) != layers:
        raise UsageError(f"{WHERE}: --moe-layer-freq is for {len(pattern)} layers, --num-layers says {layers}")
    return pattern.count(0)
