"""A model as arguments of Megatron-LM: the inverse of ``megatron_arguments``, which reads them."""

from __future__ import annotations

from resilio_hpc.autoparallel.model.model_description import TransformerModel
from resilio_hpc.autoparallel.model.transformer import Transformer
from resilio_hpc.core.errors import UsageError


def model_flags(model: TransformerModel, costed: Transformer) -> list[str]:
    """Return the arguments that build this model. Raises UsageError for what Megatron-LM cannot build by arguments."""
    if model.parallel_mlp or model.embedding_norm or model.embedding_width != model.hidden or model.norms > 2:
        raise UsageError(
            f"--emit megatron: Megatron-LM's arguments do not describe {model.name}; --emit env has its layout"
        )
    learned = model.positions > 0
    words = {
        "num-layers": model.layers,
        "hidden-size": model.hidden,
        "num-attention-heads": model.heads,
        "ffn-hidden-size": model.ffn,
        "max-position-embeddings": model.positions or max(model.seq, costed.seq),
        "position-embedding-type": "learned_absolute" if learned else "rope",
        "normalization": "LayerNorm" if model.norm_bias else "RMSNorm",
        "vocab-size": model.vocab,
        "tokenizer-type": "NullTokenizer",
    }
    flags = {
        "swiglu": model.gated,
        "untie-embeddings-and-output-weights": not model.tied,
        "disable-bias-linear": not model.mlp_bias,
        "add-qkv-bias": model.qkv_bias and not model.mlp_bias,
        "qk-layernorm": model.qk_norm,
    }
    if model.kv_rank:
        flags["multi-latent-attention"] = True
        words |= {"kv-lora-rank": model.kv_rank, "qk-head-dim": model.head_dim - model.rope_dim}
        words |= {"qk-pos-emb-head-dim": model.rope_dim, "v-head-dim": model.value_dim}
        words |= {"q-lora-rank": model.query_rank} if model.query_rank else {}
    else:
        words |= {"kv-channels": model.head_dim} if model.head_dim * model.heads != model.hidden else {}
        flags["group-query-attention"] = model.kv_heads != model.heads
        words |= {"num-query-groups": model.kv_heads} if model.kv_heads != model.heads else {}
    if model.experts:
        words |= {"num-experts": model.experts, "moe-router-topk": model.topk, "moe-ffn-hidden-size": model.expert_ffn}
        words |= {"moe-shared-expert-intermediate-size": model.shared_ffn} if model.shared_ffn else {}
        dense = f"([0]*{model.dense_layers}+[1]*{model.layers - model.dense_layers})"
        words |= {"moe-layer-freq": dense} if model.dense_layers else {}
        flags |= {"moe-router-enable-expert-bias": model.router_bias, "moe-shared-expert-gate": model.shared_gate}
        words |= (
            {"moe-router-score-function": "sigmoid"} if model.router_bias else {}
        )  # Megatron has the bias with it alone
        flags["moe-grouped-gemm"] = True
    return [f"--{name}={value}" for name, value in words.items()] + [f"--{name}" for name, on in flags.items() if on]


def precision_flags(precision: str) -> list[str]:
    """Return the arguments of a precision; "" is bf16."""
    if precision.startswith("fp16"):
        return ["--fp16"]
    recipe = {"fp8": "tensorwise", "fp8 rowwise": "tensorwise", "mxfp8": "mxfp8"}.get(precision)
    if precision in ("nvfp4", "fp4"):
        return ["--bf16", "--fp4-format=e2m1", "--fp4-recipe=nvfp4"]
    if precision == "fp32":
        return []
    return ["--bf16", *(["--fp8-format=hybrid", f"--fp8-recipe={recipe}"] if recipe else [])]
