"""A layout as a row of a table: the inverse of ``rows.case``, which reads it."""

from __future__ import annotations

from resilio_hpc.autoparallel.base.hardware import Machine
from resilio_hpc.autoparallel.base.layout import Layout, Recompute, Schedule
from resilio_hpc.autoparallel.model.transformer import Transformer

COLUMNS = (
    "model", "layers", "hidden", "heads", "kv_heads", "ffn", "mlp", "vocab", "experts", "topk", "seq", "global_batch",
    "micro_batch", "gpu", "gpus_per_node", "interconnect", "num_gpus", "tp", "pp", "vpp", "dp", "cp", "ep", "etp",
    "head_layers", "replicas", "offload",
    "sequence_parallel", "recompute", "zero", "schedule", "precision", "framework",
)  # fmt: skip
_SCHEDULES = {
    Schedule.ONE_F_ONE_B: "1f1b", Schedule.GPIPE: "gpipe", Schedule.ZBH1: "zb-h1", Schedule.ZB1P: "zb-1p",
    Schedule.ZB2P: "zb-2p", Schedule.ZBV: "zb-v", Schedule.DUALPIPE: "dualpipe",
}  # fmt: skip


def row_of(model: Transformer, layout: Layout, machine: Machine, framework: str, precision: str) -> dict[str, str]:
    """Return the row. ``framework``, ``precision``: as in ``resilio plan``."""
    recompute = "selective" if layout.recompute == Recompute.ALTERNATE else layout.recompute.name.lower()
    interleaved = layout.vpp > 1 and layout.schedule == Schedule.ONE_F_ONE_B
    cells = {
        "model": model.name,
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.kv_heads or model.heads,
        "ffn": model.expert_ffn if model.experts else model.ffn,
        "mlp": _mlp(model),
        "vocab": model.vocab,
        "experts": model.experts or "",
        "topk": model.topk or "",
        "seq": model.seq,
        "global_batch": layout.global_batch,
        "micro_batch": layout.micro_batch,
        "gpu": machine.gpu,
        "gpus_per_node": machine.node_gpus,
        "interconnect": f"{round(machine.nic_gbytes_s * 8)}Gb/s per node",
        "num_gpus": layout.num_gpus,
        **{name: getattr(layout, name) for name in ("tp", "pp", "vpp", "dp", "cp", "ep", "replicas", "zero")},
        **{name: getattr(layout, name) or "" for name in ("etp", "head_layers")},
        "offload": layout.offload.name.lower() if layout.offload else "",
        "sequence_parallel": int(layout.sequence_parallel),
        "recompute": recompute,
        "schedule": "interleaved 1f1b" if interleaved else _SCHEDULES[layout.schedule],
        "precision": precision or "bf16",
        "framework": framework,
    }
    return {name: str(cells[name]) for name in COLUMNS}


def _mlp(model: Transformer) -> str:
    """Return what has no column of its own, in the words of the tables."""
    words = ["swiglu" if model.gated else "gelu", "tied" if model.tied else "untied"]
    words += [f"head_dim {model.head_dim}"] * (model.head_dim > 0)
    if model.experts:
        words += [f"dense ffn {model.ffn}"]
        words += [f"first {model.dense_layers} layers dense"] * (model.dense_layers > 0)
        words += [f"shared ffn {model.shared_ffn}"] * (model.shared_ffn > 0)
    words += [f"sliding window {model.window}"] * (model.window > 0)
    return ", ".join(words)
