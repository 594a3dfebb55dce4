"""Rows of published measurements (CSV, one layout per row) as models, layouts, machines and software.

Missing cells get the defaults below, each of which is named in the row's note.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files

from resilio_hpc.autoparallel.base.hardware import Machine, machine
from resilio_hpc.autoparallel.base.known_words import misspelt_framework, misspelt_precision
from resilio_hpc.autoparallel.base.layout import Layout, Offload, Recompute, Schedule
from resilio_hpc.autoparallel.base.stack import Stack
from resilio_hpc.autoparallel.measure.cells import Cells
from resilio_hpc.autoparallel.model.families import family
from resilio_hpc.autoparallel.model.transformer import Transformer
from resilio_hpc.core.compat import tomllib
from resilio_hpc.core.errors import UsageError

DEFAULT_VOCAB = 51200  # GPT-2's, padded by Megatron
# of a rail's rate, NCCL's share through Omni-Path without GPUDirect: one group measured 5.06 of 12.5 GB/s (bigscience
# experiments/bandwidth, nodes of 8 A100)
OMNIPATH = 0.4


@dataclass(frozen=True)
class Case:
    """One row, understood. ``assumed``: defaults that were used.

    ``open``: parts of the layout that the row does not state and that tuning decides (``unstated.py``).
    """

    model: Transformer
    layout: Layout
    machine: Machine
    stack: Stack
    framework: str
    assumed: tuple[str, ...] = field(default=())
    open: frozenset[str] = frozenset()


def case(row: Mapping[str, str]) -> Case:
    """Return a row as a case; UsageError names the cell that prevents it."""
    cells = Cells(row)
    model = _model(cells)
    framework = cells.text("framework").lower()
    _refuse_misspelt("framework", framework, misspelt_framework(framework))
    _refuse_misspelt("precision", cells.text("precision"), misspelt_precision(cells.text("precision")))
    layout, unstated = _layout(cells, model, framework)
    if layout.pp * layout.vpp > model.layers + 2:  # embedding and head may count as layers
        raise UsageError(f"pp * vpp = {layout.pp * layout.vpp} stages, but the model has {model.layers} layers")
    if layout.etp and layout.tp % layout.etp:
        raise UsageError(f"etp = {layout.etp} does not divide tp = {layout.tp}")
    if layout.head_layers and layout.pp * layout.head_layers > model.layers + layout.head_layers:
        raise UsageError(f"head_layers = {layout.head_layers} leaves the last of {layout.pp} stages less than nothing")
    if layout.tp > model.heads:
        raise UsageError(f"tp = {layout.tp} does not divide {model.heads} heads")
    machine, stack = _machine(cells), _stack(cells, framework)
    refuse_precision(machine, stack.precision, f"precision {cells.text('precision')[:40]}")
    return Case(model, layout, machine, stack, framework, tuple(cells.assumed), unstated)


def _refuse_misspelt(name: str, text: str, near: str) -> None:
    if near:
        raise UsageError(f"{name} = {text[:40]!r} is not known: did you mean {near}?")


def _number_in(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def _model(cells: Cells) -> Transformer:
    hidden, mlp = cells.whole("hidden"), cells.text("mlp").lower()
    head_dim = _number_in(r"head_dim (\d+)", mlp)
    heads = cells.whole("heads", max(1, hidden // (head_dim or 128)))
    ffn = cells.whole("ffn", 4 * hidden)
    experts = cells.whole("experts") if cells.text("experts") else 0
    layers = cells.whole("layers")
    dense = min(_number_in(r"first (\d+) layers? dense", mlp), layers) if experts else 0
    return Transformer(
        name=cells.text("model") or "model",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=min(cells.whole("kv_heads", heads), heads),
        head_dim=head_dim,
        ffn=_number_in(r"dense ffn (\d+)", mlp) or ffn,
        gated="swiglu" in mlp or "geglu" in mlp,
        tied="untied" not in mlp if "tied" in mlp else "swiglu" not in mlp,
        vocab=cells.whole("vocab", DEFAULT_VOCAB),
        seq=cells.whole("seq"),
        experts=experts,
        topk=min(cells.whole("topk", 1), experts) if experts else 0,
        expert_ffn=ffn if experts else 0,
        shared_ffn=_number_in(r"shared ffn (\d+)", mlp) or _number_in(r"\+(\d+) shared", mlp) * ffn if experts else 0,
        dense_layers=dense,
        window=_number_in(r"sliding window (\d+)", mlp),
        **family(cells.text("model")),
    )


def _layout(cells: Cells, model: Transformer, framework: str) -> tuple[Layout, frozenset[str]]:
    """Return the layout, and what of it the row leaves open."""
    tp, pp, cp = (cells.whole(name, 1) for name in ("tp", "pp", "cp"))
    gpus = cells.whole("num_gpus") if cells.text("num_gpus") else 0
    if not gpus and not cells.text("dp"):
        raise UsageError("num_gpus and dp are both empty")
    dp = cells.whole("dp", max(1, gpus // (tp * pp * cp)))
    if gpus and tp * pp * cp * dp != gpus:
        raise UsageError(f"tp * pp * cp * dp = {tp * pp * cp * dp}, but num_gpus = {gpus}")
    words = cells.text("schedule").lower()
    vpp, open_vpp = _interleaving(cells, words, framework, pp)
    text = cells.text("micro_batch")
    fixed = 0 if text else _cut(cells, framework, dp, pp * vpp)
    micro = fixed or cells.whole("micro_batch", 1)
    recompute, stated = _recompute(cells.text("recompute").lower(), framework)
    open_parts = {
        "vpp": open_vpp,
        "micro_batch": not text and not fixed and bool(cells.text("global_batch")),
        "recompute": not stated,
        "zero": not cells.stated("zero"),
    }
    sequence = cells.text("sequence_parallel")
    return Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        ep=min(cells.whole("ep", 1), max(1, model.experts)),
        micro_batch=micro,
        global_batch=cells.whole("global_batch", micro * dp * max(1, 4 * (pp - 1))),
        vpp=vpp,
        sequence_parallel=tp > 1 and (sequence == "1" if sequence else bool(_rule(framework).get("sequence_parallel"))),
        recompute=recompute,
        zero=_zero(cells.text("zero").lower()),
        replicas=cells.whole("replicas") if cells.text("replicas") else 1,
        schedule=_schedule(words),
        etp=cells.whole("etp") if cells.text("etp") else 0,
        head_layers=cells.whole("head_layers") if cells.text("head_layers") else 0,
        offload=_offload(cells.text("offload")),
    ), frozenset(name for name, is_open in open_parts.items() if is_open)


def _interleaving(cells: Cells, schedule: str, framework: str, pp: int) -> tuple[int, bool]:
    """Return the chunks of a stage, and whether the row leaves them open. torchtitan interleaves two by default."""
    interleaved = "interleaved" in schedule or "1f1b-i" in schedule
    if pp == 1 or cells.text("vpp"):
        return (cells.whole("vpp", 1) if pp > 1 else 1), False
    if schedule and not interleaved:
        return 1, False
    if "torchtitan" in framework:
        return 2 if interleaved else 1, False
    return 2 if interleaved else 1, True


_SCHEDULES = {
    "zb-?1p": Schedule.ZB1P, "zb-?2p": Schedule.ZB2P, "zb-?h2": Schedule.ZB2P, "zb-?v|zero.?bubble.?v": Schedule.ZBV,
    "zb|zero.?bubble": Schedule.ZBH1, "dual.?pipe": Schedule.DUALPIPE, "gpipe": Schedule.GPIPE,
}  # fmt: skip


def _schedule(words: str) -> Schedule:
    found = (kind for pattern, kind in _SCHEDULES.items() if re.search(pattern, words))
    return next(found, Schedule.ONE_F_ONE_B)


def _offload(text: str) -> Offload:
    if text and text.upper() not in Offload.__members__:
        known = ", ".join(name.lower() for name in Offload.__members__)
        raise UsageError(f"offload = {text[:40]!r} is not known: it is {known}")
    return Offload[text.upper()] if text else Offload.NONE


def _cut(cells: Cells, framework: str, dp: int, stages: int) -> int:
    """Return a micro-batch by rule, else 0: torchtitan cuts a replica's batch into as many as there are stages."""
    text = cells.text("global_batch")
    if "torchtitan" not in framework or stages == 1 or not text:
        return 0
    micro = max(1, cells.whole("global_batch") // (dp * stages))
    cells.assumed.append(f"micro_batch={micro}")
    return micro


def _recompute(text: str, framework: str) -> tuple[Recompute, bool]:
    if "selective" in text:
        return (Recompute.ALTERNATE if "torchtitan" in framework else Recompute.SELECTIVE), True
    if "full" in text:
        return Recompute.FULL, True
    return Recompute.NONE, text.startswith("none") or text == "0"


def _zero(text: str) -> int:
    if "zero-2" in text or "shard_grad" in text or "no reshard" in text:
        return 2
    if "fsdp" in text or "zero-3" in text:
        return 3
    if "distributed optimizer" in text:
        return 1
    return min(int(text[0]), 3) if text[:1].isdigit() else 0


@cache
def _rules() -> tuple[Mapping[str, object], ...]:
    text = files("resilio_hpc.autoparallel").joinpath("stacks.toml").read_text()
    return tuple(tomllib.loads(text)["stack"])


def _rule(framework: str) -> Mapping[str, object]:
    return next(rule for rule in _rules() if str(rule["pattern"]) in framework)


def _stack(cells: Cells, framework: str) -> Stack:
    rule = {key: value for key, value in _rule(framework).items() if key in Stack.__dataclass_fields__}
    stack = Stack(**rule)  # type: ignore[arg-type]
    kernel = cells.text("attn_kernel").lower()
    if kernel:
        plain = any(word in kernel for word in ("softmax", "local", "unfused"))
        stack = replace(stack, flash=0 if plain else max(stack.flash, 1), causal=not plain)
    precision = cells.text("precision").lower()
    bits = 4 if "fp4" in precision else 8 if "fp8" in precision else 32 if "fp32" in precision else 16
    return replace(
        stack,
        precision=bits,
        row_scales="rowwise" in precision,
        fused_experts=_fused_experts(cells, framework, precision),
        fused_clamp=_fused_clamp(cells, framework),
        **_overlaps(cells, framework),  # type: ignore[arg-type]
        both_grads="deepspeed" in framework and precision.startswith("bf16"),
        grad_bytes=_gradient_bytes(stack, framework, precision),
    )


def _overlaps(cells: Cells, framework: str) -> dict[str, int]:
    """Return what the row says of overlaps: part of the framework's name, or Megatron's flags in the notes."""
    notes, found = cells.text("notes").lower(), dict[str, int]()
    if "asynctp" in framework or "tp-comm-overlap on" in notes or "--tp-comm-overlap" in notes:
        found["overlap_tp"] = 2
    if "overlap-grad-reduce" in notes:
        found["overlap_dp"] = 2 if "overlap-param-gather" in notes else 1
    return found


def _fused_experts(cells: Cells, framework: str, precision: str) -> bool:
    """Return whether this release has the kernels; tables name it in the framework or in the source of the row."""
    since = str(_rule(framework).get("fused_experts_since", ""))
    found = re.search(r"\b(\d\d\.\d\d)(?:\.\d+)? nemo container", f"{framework} {cells.text('source').lower()}")
    return bool(since and found and found[1] >= since and ("mx" in precision))


def _fused_clamp(cells: Cells, framework: str) -> bool:
    """Return whether this release has one kernel for the clamped activation."""
    found = re.search(r"\b(\d\d\.\d\d(?:\.\d+)?) nemo container", f"{framework} {cells.text('source').lower()}")
    slow = str(_rule(framework).get("slow_clamp", ""))
    return bool(found and found[1] != slow and _fused_experts(cells, framework, cells.text("precision").lower()))


def _gradient_bytes(stack: Stack, framework: str, precision: str) -> int:
    if "deepspeed" in framework and precision.startswith("bf16"):
        return 4
    return 2 if precision.startswith("fp16") else stack.grad_bytes


def _machine(cells: Cells) -> Machine:
    found = machine(cells.text("gpu") or "unnamed")
    node = cells.whole("gpus_per_node", found.node_gpus)
    found = replace(found, node_gpus=node, domain_gpus=max(node, found.domain_gpus if found.domain_gpus > 8 else 0))
    nic = _network(cells.text("interconnect").lower(), node)
    return replace(found, nic_gbytes_s=nic) if nic else found


def refuse_precision(machine: Machine, bits: int, asked: str) -> None:
    """Raise UsageError where the GPU multiplies no numbers of so few bits."""
    if (bits == 8 and not machine.fp8) or (bits == 4 and not machine.fp4):
        raise UsageError(f"{asked}: {machine.gpu} has no products of {bits} bits: bf16, fp16 or another GPU")


def _network(text: str, node_gpus: int) -> float:
    """Return the GB/s of a node's network, if stated."""
    found = re.search(r"(\d+)\s*x\s*(?:\w+ )?(\d+)\s*gb/s", text)
    if found:
        return int(found[1]) * int(found[2]) / 8 * (OMNIPATH if "omnipath" in text else 1.0)
    found = re.search(r"(\d+)\s*gb/s[^;,]*per gpu", text)
    if found:
        return int(found[1]) * node_gpus / 8
    found = re.search(r"(\d+)\s*gb/s[^;,]*per node", text)
    return int(found[1]) / 8 if found else 0.0
