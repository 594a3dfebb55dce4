"""What a prober does on its node: matrix products and all-reduces, timed in blocks, every result verified.

All numbers are small and whole, so that sums are exact in float32 and TF32, in whatever order they are made: a result
that differs is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from resilio_hpc.diagnose.pipe_store import PipeStore
from resilio_hpc.diagnose.policy import PairPolicy

_PATTERN = 101  # values of a message are below it, and their sums exact
_kept: list[Any] = []  # gloo's groups may deadlock in their destructor (torch 2.13): the process's end frees them


class WrongResult(Exception):
    """The numbers are not what they have to be."""


def devices() -> list[torch.device]:
    """The GPUs that this process may use; the CPU where there is none."""
    if torch.cuda.is_available():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.device("cpu")]


def name_of(device: torch.device) -> str:
    """For people: ``cpu x4``, ``cuda:0 NVIDIA H100``."""
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return f"cpu x{torch.get_num_threads()}"


def compute(policy: PairPolicy) -> tuple[str, tuple[float, ...]]:
    """The slowest device and its seconds per product, block by block. Raises WrongResult."""
    timed = [(name_of(device), _compute_on(device, policy)) for device in devices()]
    return max(timed, key=lambda one: min(one[1]))


def _compute_on(device: torch.device, policy: PairPolicy) -> tuple[float, ...]:
    size = policy.gpu_matrix if device.type == "cuda" else policy.cpu_matrix
    torch.backends.cuda.matmul.allow_tf32 = True
    draw = torch.Generator().manual_seed(size)
    a, b = (torch.randint(-2, 3, (size, size), generator=draw).to(device, torch.float32) for _ in range(2))
    expected = a @ b  # also what a first call costs more
    _verify_product(a, b, expected, device)

    def product() -> None:
        if not torch.equal(a @ b, expected):
            raise WrongResult(f"a matrix product on {name_of(device)} differs from the same product before")

    return _timed(product, device, policy)


def _verify_product(a: torch.Tensor, b: torch.Tensor, product: torch.Tensor, device: torch.device) -> None:
    """Freivalds' check with a vector that has no zero: any single wrong number shows, and several nearly always."""
    vector = torch.arange(1, a.shape[0] + 1, dtype=torch.float64, device=device) % 7 + 1
    if not torch.equal(product.double() @ vector, a.double() @ (b.double() @ vector)):
        raise WrongResult(f"a matrix product on {name_of(device)} is wrong")


def _timed(operation: Callable[[], None], device: torch.device, policy: PairPolicy) -> tuple[float, ...]:
    """Seconds per operation of each block; a block lasts ``block_s`` at least."""
    blocks = []
    for _ in range(policy.blocks):
        began, count, now = time.perf_counter(), 0, 0.0
        while now < policy.block_s:
            operation()
            _finish(device)
            count += 1
            now = time.perf_counter() - began
        blocks.append(now / count)
    return tuple(blocks)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def join(store: PipeStore, rank: int, policy: PairPolicy) -> Any:
    """The pair's process group: NCCL between GPUs, gloo between CPUs. Returns when both are in it."""
    limit = timedelta(seconds=policy.collective_s)
    if devices()[0].type == "cuda":
        torch.cuda.set_device(0)
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = limit
        group = nccl(store, rank, 2, options)
    else:
        group = dist.ProcessGroupGloo(store, rank, 2, limit)
    _kept.append(group)
    return group


def communicate(group: Any, rank: int, policy: PairPolicy) -> tuple[float, ...]:
    """Seconds per all-reduce, block by block. Raises WrongResult; RuntimeError where the group fails."""
    device = devices()[0]
    size = (policy.gpu_message_bytes if device.type == "cuda" else policy.cpu_message_bytes) // 4
    pattern = torch.arange(size, device=device, dtype=torch.float32) % _PATTERN
    message, expected = pattern * (rank + 1), pattern * 3

    def all_reduce() -> None:
        data = message.clone()
        group.allreduce([data]).wait()
        _finish(device)
        if not torch.equal(data, expected):
            raise WrongResult("an all-reduce gave a wrong sum")

    all_reduce()  # connects, and lets the two begin together
    blocks = []
    for _ in range(policy.blocks):
        began = time.perf_counter()
        for _ in range(policy.messages_per_block):
            all_reduce()
        blocks.append((time.perf_counter() - began) / policy.messages_per_block)
    return tuple(blocks)
