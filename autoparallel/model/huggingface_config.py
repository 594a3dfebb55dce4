"""Hugging Face's config.json: one reader per ``model_type``, with the defaults of that type's class."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from resilio_hpc.autoparallel.base.config_values import ConfigValues
from resilio_hpc.autoparallel.model.model_description import TransformerModel
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.json_fields import parse_object, printable

LARGEST_BYTES = 4 << 20
REMEDY = "give the model itself (--module) or Megatron's arguments (--megatron)"


def from_huggingface(text: str | bytes, where: str) -> TransformerModel:
    """Return the model of a config.json.

    Raises UsageError, which names the key that is wrong, missing or unknown.
    """
    data = parse_object(text) if len(text) <= LARGEST_BYTES else None
    if data is None:
        raise UsageError(f"{printable(where)}: not a JSON object of at most {LARGEST_BYTES >> 20} MiB")
    return from_mapping(data, where)


def from_mapping(data: Mapping[str, object], where: str) -> TransformerModel:
    """Return the same for the result of json.load."""
    values = ConfigValues(printable(where), data)
    kind, text = values.text("model_type"), data.get("text_config")
    if kind not in READERS and isinstance(text, Mapping):  # a model of images and text: its decoder alone
        return from_mapping(text, f"{where}: text_config")
    if kind not in READERS:
        near = difflib.get_close_matches(kind, READERS, 1, 0.7)
        hint = f"did you mean {near[0]}? " if near else ""
        what = f"model_type {printable(repr(kind), 60)} is not known" if kind else "model_type is missing"
        raise UsageError(f"{values.where}: {what}: {hint}Known are {', '.join(READERS)}. For others {REMEDY}")
    values.must_be("is_encoder_decoder", False, why="only decoders are described")
    return READERS[kind](values)


def _name(values: ConfigValues) -> str:
    return printable(values.text("_name_or_path") or values.text("model_type"), 100)


def _gpt2(values: ConfigValues) -> TransformerModel:
    hidden = values.whole("n_embd", 768)
    positions = values.whole("n_positions", 1024)
    values.must_be("add_cross_attention", False, why="cross-attention is not described")
    return TransformerModel(
        _name(values), values.whole("n_layer", 12), hidden, values.whole("n_head", 12),
        values.whole("n_inner", 4 * hidden), values.whole("vocab_size", 50257), positions, positions=positions,
        tied=values.flag("tie_word_embeddings", True), **_ALL_BIASES,
    )  # fmt: skip


def _opt(values: ConfigValues) -> TransformerModel:
    hidden = values.whole("hidden_size", 768)
    positions = values.whole("max_position_embeddings", 2048)
    first_norm = values.flag("do_layer_norm_before", True)
    values.must_be("enable_bias", True, why="OPT without biases is not described")
    values.must_be("layer_norm_elementwise_affine", True, why="norms without parameters are not described")
    return TransformerModel(
        _name(values), values.whole("num_hidden_layers", 12), hidden, values.whole("num_attention_heads", 12),
        values.whole("ffn_dim", 3072), values.whole("vocab_size", 50272), positions, positions=positions + 2,
        embedding_width=values.whole("word_embed_proj_dim", hidden), tied=values.flag("tie_word_embeddings", True),
        final_norm=first_norm and not values.flag("_remove_final_layer_norm"), **_ALL_BIASES,
    )  # fmt: skip


def _bloom(values: ConfigValues) -> TransformerModel:
    hidden = values.whole("hidden_size", values.whole("n_embed", 64))
    heads = values.whole("n_head", values.whole("num_attention_heads", 8))
    return TransformerModel(
        _name(values), values.whole("n_layer", values.whole("num_hidden_layers", 2)), hidden, heads, 4 * hidden,
        values.whole("vocab_size", 250880), values.whole("seq_length", 2048), embedding_norm=True,
        tied=values.flag("tie_word_embeddings", True), **_ALL_BIASES,
    )  # fmt: skip


def _gpt_neox(values: ConfigValues) -> TransformerModel:
    biases = {**_ALL_BIASES, "qkv_bias": values.flag("attention_bias", True)}
    biases["out_bias"] = biases["qkv_bias"]
    return TransformerModel(
        _name(values), values.whole("num_hidden_layers", 44), values.whole("hidden_size", 6144),
        values.whole("num_attention_heads", 64), values.whole("intermediate_size", 24576),
        values.whole("vocab_size", 50432), values.whole("max_position_embeddings", 2048),
        tied=values.flag("tie_word_embeddings"), parallel_mlp=values.flag("use_parallel_residual", True), **biases,
    )  # fmt: skip


def _mpt(values: ConfigValues) -> TransformerModel:
    hidden = values.whole("d_model", 2048)
    values.must_be("no_bias", True, why="MPT with biases is not described")
    ratio = values.whole("expansion_ratio", 4)
    return TransformerModel(
        _name(values), values.whole("n_layers", 24), hidden, values.whole("n_heads", 16), ratio * hidden,
        values.whole("vocab_size", 50368), values.whole("max_seq_len", 2048),
        tied=values.flag("tie_word_embeddings", True),
    )  # fmt: skip


def _llama(values: ConfigValues, **more: int | bool) -> TransformerModel:
    """Return Llama, or a model of the same structure."""
    biases = values.flag("attention_bias")
    fields: dict[str, int | bool] = {
        "kv_heads": values.whole("num_key_value_heads", 0), "head_dim": values.whole("head_dim", 0), "gated": True,
        "tied": values.flag("tie_word_embeddings"), "qkv_bias": biases, "out_bias": biases,
        "mlp_bias": values.flag("mlp_bias"),
    }  # fmt: skip
    ffn = more.pop("ffn", 0) or values.whole("intermediate_size")
    return TransformerModel(
        _name(values), values.whole("num_hidden_layers"), values.whole("hidden_size"),
        values.whole("num_attention_heads"), ffn, values.whole("vocab_size"),
        values.whole("max_position_embeddings", 2048), **{**fields, **more},  # type: ignore[arg-type]
    )  # fmt: skip


def _mixtral(values: ConfigValues) -> TransformerModel:
    experts, topk = values.whole("num_local_experts", 8), values.whole("num_experts_per_tok", 2)
    return _llama(values, experts=experts, topk=topk, expert_ffn=values.whole("intermediate_size"))


def _qwen2(values: ConfigValues) -> TransformerModel:
    return _llama(values, qkv_bias=True, out_bias=False)


def _qwen3(values: ConfigValues) -> TransformerModel:
    return _llama(values, qk_norm=True, head_dim=values.whole("head_dim", 128))


def _qwen2_moe(values: ConfigValues) -> TransformerModel:
    shared = values.whole("shared_expert_intermediate_size", 5632)
    return _llama(
        values, qkv_bias=True, out_bias=False, shared_ffn=shared, shared_gate=True, **_qwen_experts(values, 60, 4)
    )


def _qwen3_moe(values: ConfigValues) -> TransformerModel:
    head_dim = values.whole("head_dim", 0)
    return _llama(values, qk_norm=True, head_dim=head_dim, **_qwen_experts(values, 128, 8))


def _qwen_experts(values: ConfigValues, experts: int, topk: int) -> dict[str, int]:
    values.must_be("decoder_sparse_step", 1, why="experts in every layer only")
    values.must_be("mlp_only_layers", [], why="experts in every layer only")
    return {
        "experts": values.whole("num_experts", experts), "topk": values.whole("num_experts_per_tok", topk),
        "expert_ffn": values.whole("moe_intermediate_size"),
    }  # fmt: skip


def _deepseek(values: ConfigValues) -> TransformerModel:
    values.must_be("moe_layer_freq", 1, why="experts in every layer after the first dense ones only")
    rope, expert_ffn = values.whole("qk_rope_head_dim", 64), values.whole("moe_intermediate_size")
    third = values.text("model_type") == "deepseek_v3"
    return _llama(
        values, head_dim=values.whole("qk_nope_head_dim", 128) + rope, rope_dim=rope,
        value_dim=values.whole("v_head_dim", 128), kv_rank=values.whole("kv_lora_rank", 512),
        query_rank=values.whole("q_lora_rank", 0), kv_heads=0, experts=values.whole("n_routed_experts"),
        topk=values.whole("num_experts_per_tok"), expert_ffn=expert_ffn,
        shared_ffn=values.whole("n_shared_experts", 0) * expert_ffn,
        dense_layers=values.whole("first_k_dense_replace", 0), router_bias=third,
    )  # fmt: skip


def _gemma(values: ConfigValues) -> TransformerModel:
    return _llama(values, head_dim=values.whole("head_dim", 256), tied=values.flag("tie_word_embeddings", True))


def _gemma2(values: ConfigValues) -> TransformerModel:
    return _llama(
        values, head_dim=values.whole("head_dim", 256), tied=values.flag("tie_word_embeddings", True), norms=4,
        window=values.whole("sliding_window", 4096),
    )  # fmt: skip


def _gemma3(values: ConfigValues) -> TransformerModel:
    """Return Gemma 3, of whose windows, in five layers of six, nothing is counted."""
    return _llama(
        values, head_dim=values.whole("head_dim", 256), tied=values.flag("tie_word_embeddings", True), norms=4,
        qk_norm=True,
    )  # fmt: skip


def _llama4(values: ConfigValues) -> TransformerModel:
    step = values.whole("interleave_moe_layer_step", 1)
    expert_ffn, layers = values.whole("intermediate_size"), values.whole("num_hidden_layers")
    return _llama(
        values, ffn=values.whole("intermediate_size_mlp", expert_ffn), experts=values.whole("num_local_experts"),
        topk=values.whole("num_experts_per_tok", 1), expert_ffn=expert_ffn, shared_ffn=expert_ffn,
        dense_layers=layers - layers // max(step, 1),
    )  # fmt: skip


def _gpt_oss(values: ConfigValues) -> TransformerModel:
    width = values.whole("intermediate_size")
    return _llama(
        values, head_dim=values.whole("head_dim", 64), experts=values.whole("num_local_experts"),
        topk=values.whole("num_experts_per_tok", 4), expert_ffn=width, qkv_bias=True, out_bias=True, mlp_bias=True,
        router_bias=True, sinks=True, window=values.whole("sliding_window", 128),
    )  # fmt: skip


def _glm(values: ConfigValues, **more: int | bool) -> TransformerModel:
    biases = values.flag("attention_bias")
    return _llama(values, head_dim=values.whole("head_dim", 128), qkv_bias=biases, out_bias=False, **more)


def _glm4(values: ConfigValues) -> TransformerModel:
    return _glm(values, norms=4)


def _olmo(values: ConfigValues) -> TransformerModel:
    return _llama(values, norms=0, final_norm=False)  # its norms have no parameters


def _olmo2(values: ConfigValues) -> TransformerModel:
    return _llama(values, qk_norm_whole=True)


_ALL_BIASES = {"norm_bias": True, "qkv_bias": True, "out_bias": True, "mlp_bias": True}
READERS: dict[str, Callable[[ConfigValues], TransformerModel]] = {
    "gpt2": _gpt2, "opt": _opt, "bloom": _bloom, "gpt_neox": _gpt_neox, "mpt": _mpt, "llama": _llama,
    "mistral": _llama, "mixtral": _mixtral, "qwen2": _qwen2, "qwen3": _qwen3, "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe, "deepseek_v2": _deepseek, "deepseek_v3": _deepseek,
    "gemma": _gemma, "gemma2": _gemma2, "gemma3_text": _gemma3, "llama4_text": _llama4, "gpt_oss": _gpt_oss,
    "phi3": _llama, "glm": _glm, "glm4": _glm4, "olmo": _olmo, "olmo2": _olmo2,
}  # fmt: skip
