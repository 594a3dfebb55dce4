"""What saving a GPU's state costs: how long training is blocked, and how fast the state leaves the device.

    python benchmarks/checkpoint_gpu.py [--gigabytes 10] [--pairs 10] [--directory DIR]

A model with AdamW trains on one GPU; blocks of steps with a save in the middle and without take turns. ``blocked``: how
long ``save`` takes the host; ``step after a save``: its median, as a multiple of the others; ``to memory``: until the
snapshot is whole, checksums included; ``limit``: as many bytes into page-locked memory of torch, all else idle.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from measure import shown

WIDTH = 4096
STEPS = 4


def pinned_copy_s(size_bytes: int) -> float:
    """Return the limit: one copy of so many bytes, piece by piece, into memory that is reused."""
    import torch

    source = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    target = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(size_bytes // (64 << 20)):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - began


class Training:
    def __init__(self, gigabytes: float) -> None:
        import torch

        layers = max(1, round(gigabytes * 1e9 / 12 / WIDTH / WIDTH))
        self.model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)]).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        self.size_bytes = sum(p.nbytes for p in self.model.parameters()) * 3

    def step(self) -> float:
        import torch

        began = time.perf_counter()
        self.model(torch.rand(2048, WIDTH, device="cuda")).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.cuda.synchronize()
        return time.perf_counter() - began


def measure(gigabytes: float, pairs: int, directory: Path) -> dict[str, Any]:
    import torch

    from resilio_hpc import ckpt

    training = Training(gigabytes)
    for _ in range(3):
        training.step()
    checkpointer = ckpt.Checkpointer(directory, keep_last=2, overlap=True)
    found: dict[str, Any] = {key: [] for key in ("plain", "saving", "blocked", "memory", "durable", "limit")}
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    peak_of_steps = 0
    for pair in range(-2, pairs):  # the first ones make arenas
        plain = [training.step() for _ in range(STEPS)]
        peak_of_steps = max(peak_of_steps, torch.cuda.max_memory_allocated()) if pair == -2 else peak_of_steps
        began = time.perf_counter()
        handle = checkpointer.save(pair + 3, {"model": training.model, "optimizer": training.optimizer})
        blocked = time.perf_counter() - began
        saving = [training.step()]
        handle.wait("memory", 600)
        memory = time.perf_counter() - began
        handle.wait("committed", 600)
        durable = time.perf_counter() - began
        limit = pinned_copy_s(training.size_bytes)
        if pair >= 0:
            for key, values in (("plain", plain), ("saving", saving)):
                found[key] += values
            for key, value in (("blocked", blocked), ("memory", memory), ("durable", durable), ("limit", limit)):
                found[key].append(value)
    found["gigabytes"] = training.size_bytes / 1e9
    found["more_memory"] = torch.cuda.max_memory_allocated() - max(peak_of_steps, held)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=10.0, metavar="N", help="of the state (10)")
    parser.add_argument("--pairs", type=int, default=10, metavar="N", help="blocks with and without saves (10 each)")
    parser.add_argument("--directory", type=Path, default=Path("checkpoint-gpu"), help="where steps go (%(default)s)")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        sys.exit("checkpoint_gpu: this machine has no CUDA device")
    found = measure(options.gigabytes, options.pairs, options.directory)
    middle = {key: statistics.median(value) for key, value in found.items() if isinstance(value, list)}
    table = Table(title=f"{found['gigabytes']:.1f} GB on {torch.cuda.get_device_name()}: medians", title_justify="left")
    for column in ("blocked", "to memory", "limit", "durable", "step", "step after a save", "more memory, MB"):
        table.add_column(column)
    row = [shown(middle[key]) for key in ("blocked", "memory", "limit", "durable", "plain")]
    table.add_row(*row, f"× {middle['saving'] / middle['plain']:.2f}", f"{found['more_memory'] / 1e6:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
