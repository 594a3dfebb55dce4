"""Predicted against measured: one training step of five transformers on one GPU, its time and its peak memory.

    python benchmarks/planner_gpu.py [--profile FILE.h5] [--device cpu --sizes tiny] [--json]

Each model is a GPT in bf16 autocast with fp32 weights, FlashAttention, blocks compiled one by one, and fused AdamW: the
planner knows this as the framework "torch.compile". With --profile, what the GPU's operators reach (resilio plan
profile) takes the place of the shipped numbers. A CPU tries the way; its times are of no GPU, and are not compared.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as functional
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from resilio_hpc.autoparallel.base.efficiency import shipped
from resilio_hpc.autoparallel.measure.predict import predict_rows
from resilio_hpc.autoparallel.measure.profile import Profile
from resilio_hpc.autoparallel.measure.profile_file import read

WARM, STEPS = 5, 15


@dataclass(frozen=True)
class Size:
    """``batch``: sequences of a step, all in one micro-batch."""

    name: str
    layers: int
    hidden: int
    heads: int
    batch: int
    seq: int = 2048
    vocab: int = 51200


SIZES = {
    "gpt3": (  # arXiv:2005.14165, table 2.1
        Size("125M", 12, 768, 12, 16),
        Size("350M", 24, 1024, 16, 16),
        Size("760M", 24, 1536, 16, 8),
        Size("1.3B", 24, 2048, 16, 8),
        Size("2.7B", 32, 2560, 32, 4),
    ),
    "tiny": (Size("tiny", 2, 64, 2, 2, 64, 512), Size("small", 2, 128, 2, 2, 64, 512)),
}


@dataclass(frozen=True)
class Compared:
    """Seconds and bytes; no ``bytes`` where nothing counts them."""

    name: str
    step_s: float
    predicted_s: float
    bytes: float | None
    predicted_bytes: float


class Block(nn.Module):
    """Attention and MLP before their residual sums."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.first, self.second = nn.LayerNorm(size.hidden), nn.LayerNorm(size.hidden)
        self.qkv, self.out = nn.Linear(size.hidden, 3 * size.hidden), nn.Linear(size.hidden, size.hidden)
        self.up, self.down = nn.Linear(size.hidden, 4 * size.hidden), nn.Linear(4 * size.hidden, size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        parts = self.qkv(self.first(x)).view(batch, seq, 3, self.heads, hidden // self.heads)
        query, key, value = (part.transpose(1, 2) for part in parts.unbind(2))
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, seq, hidden))
        return x + self.down(functional.gelu(self.up(self.second(x)), approximate="tanh"))


class GPT(nn.Module):
    """Learned positions; the head's weights are the embedding's. Returns the loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(size.vocab, size.hidden), nn.Embedding(size.seq, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.last = nn.LayerNorm(size.hidden)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = (self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]).bfloat16()
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.last(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def measured(size: Size, device: torch.device) -> tuple[float, float | None]:
    """Median seconds of a step, and bytes at the peak."""
    with device:
        model = GPT(size)
        tokens, targets = (torch.randint(size.vocab, (size.batch, size.seq)) for _ in range(2))
    cuda = device.type == "cuda"
    if cuda:
        for block in model.blocks:
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16), _flash(cuda):
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(WARM):
        step()
    if not cuda:
        return statistics.median(_seconds(step, device) for _ in range(STEPS)), None
    torch.cuda.reset_peak_memory_stats()
    return statistics.median(_seconds(step, device) for _ in range(STEPS)), float(torch.cuda.max_memory_allocated())


def _flash(cuda: bool) -> contextlib.AbstractContextManager[None]:
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if cuda else contextlib.nullcontext()


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    began = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def predicted(size: Size, gpu: str, profile: Profile | None) -> tuple[float, float]:
    """Seconds and bytes."""
    row = {
        "layers": str(size.layers), "hidden": str(size.hidden), "heads": str(size.heads), "vocab": str(size.vocab),
        "seq": str(size.seq), "global_batch": str(size.batch), "micro_batch": str(size.batch), "num_gpus": "1",
        "gpu": gpu, "recompute": "none", "precision": "bf16", "framework": "torch.compile",
    }  # fmt: skip
    (found,) = predict_rows([row], shipped(), profile=profile)
    return float(found["pred_iter_time_s"]), float(found["pred_memory_gb"]) * 1e9


def compared(sizes: str, device: torch.device, profile: Profile | None) -> Iterator[Compared]:
    """One after the other, each on an empty GPU."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "A100"
    for size in SIZES[sizes]:
        seconds, peak = measured(size, device)
        told_s, told_bytes = predicted(size, gpu, profile)
        yield Compared(size.name, seconds, told_s, peak, told_bytes)
        gc.collect()
        if device.type == "cuda":
            torch.compiler.reset()
            torch.cuda.empty_cache()


def show(rows: list[Compared], gpu: str) -> None:
    table = Table("model", "step", "predicted", "error", "memory", "predicted", "error", title=gpu)
    for row in rows:
        step = [f"{row.step_s:.4g} s", f"{row.predicted_s:.4g} s", f"{row.predicted_s / row.step_s - 1:+.1%}"]
        told = f"{row.predicted_bytes / 1e9:.2f} GB"
        held = (f"{row.bytes / 1e9:.2f} GB", told, f"{row.predicted_bytes / row.bytes - 1:+.1%}") if row.bytes else ()
        table.add_row(row.name, *step, *(held or ("", told, "")))
    Console(width=110).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, metavar="FILE.h5", help="of resilio plan profile on this GPU")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--sizes", default="gpt3", choices=list(SIZES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here (--device cpu --sizes tiny tries the way)", file=sys.stderr)
        return 2
    device = torch.device(options.device)
    rows = list(compared(options.sizes, device, read(options.profile) if options.profile else None))
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU, predicted for an A100: no comparison"
    if options.json:
        print(json.dumps({"device": gpu, "rows": [vars(row) for row in rows]}, indent=1))
    else:
        show(rows, gpu)
    return 0


if __name__ == "__main__":
    sys.exit(main())
