"""A described model as the uniform transformer that the cost model knows."""

from __future__ import annotations

from resilio_hpc.autoparallel.model.model_description import TransformerModel
from resilio_hpc.autoparallel.model.transformer import Transformer


def uniform(model: TransformerModel, seq: int = 0) -> Transformer:
    """``seq``: tokens of a sequence, 0 for the model's own.

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
    )
