"""The prober's work on its node: matrix products and all-reduces, timed in blocks, every result verified.

All numbers are small and whole, so that sums are exact in float32 and TF32, in any order: a result that differs is
wrong.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from resilio_hpc.diagnose.policy import PairPolicy


class PipeStore(dist.Store):  # type: ignore[misc, name-defined]
    """A store for one order: ``put`` passes a value on, ``fetch`` waits for the other half's."""

    def __init__(self, put: Callable[[str, bytes], None], fetch: Callable[[str], bytes]) -> None:
        super().__init__()
        self._put = put
        self._fetch = fetch
        self._values: dict[str, bytes] = {}
        self._lock = threading.RLock()  # NCCL's own threads may ask, too

    def set(self, key: str, value: bytes | str) -> None:
        """Store a value."""
        data = value if isinstance(value, bytes) else str(value).encode()
        with self._lock:
            self._values[key] = data
            self._put(key, data)

    def get(self, key: str) -> bytes:
        """Return a value, as soon as it exists; the checker kills a probe that waits too long."""
        with self._lock:
            if key not in self._values:
                self._values[key] = self._fetch(key)
            return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all exist."""
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        """Return whether all are known here."""
        with self._lock:
            return all(key in self._values for key in keys)


_PATTERN = 101  # values of a message are below it, and their sums exact


class WrongResult(Exception):
    """Raised when numbers are not what they must be."""


def devices() -> list[torch.device]:
    """Return the GPUs that this process may use; the CPU where there is none."""
    if torch.cuda.is_available():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.device("cpu")]


def name_of(device: torch.device) -> str:
    """Return ``cpu x4``, ``cuda:0 NVIDIA H100``, for people."""
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return f"cpu x{torch.get_num_threads()}"


class Stopwatch:
    """Wall time, and the time that this process's threads were ready to run without a CPU.

    Other processes' work on the node is no slowness of it, so the second is subtracted. The kernel counts it
    (/proc/self/task/*/schedstat, its second number); where it does not, it is 0. A process that is stopped, or
    throttled by its cgroup or its hardware, does not wait in this sense.
    """

    def __init__(self) -> None:
        self._ran, self._waited = _scheduled()
        self._began = time.perf_counter()

    @property
    def wall_s(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self._began

    def split(self) -> tuple[float, float]:
        """Return (own seconds, seconds of waiting for a CPU); own seconds are never less than the computing time."""
        wall = self.wall_s
        ran, waited = _scheduled()
        waiting = max(0.0, waited - self._waited)
        return max(wall - waiting, min(wall, ran - self._ran), wall / 1000), min(waiting, wall)


def _scheduled() -> tuple[float, float]:
    """Return (seconds on a CPU of the main thread, seconds that all threads waited for one)."""
    ran = waited = 0.0
    for task in Path("/proc/self/task").iterdir():
        try:
            numbers = (task / "schedstat").read_text().split()
            waited += int(numbers[1]) / 1e9
            if task.name == str(os.getpid()):
                ran = int(numbers[0]) / 1e9
        except (OSError, ValueError, IndexError):
            continue
    return ran, waited


def compute(policy: PairPolicy, stopwatch: Callable[[], Stopwatch] = Stopwatch) -> tuple[str, tuple[float, ...], float]:
    """Return the slowest device, its seconds per product, block by block, and the share of waiting for a CPU.

    Raises WrongResult.
    """
    timed = [(name_of(device), *_compute_on(device, policy, stopwatch)) for device in devices()]
    return max(timed, key=lambda one: min(one[1]))


def _compute_on(
    device: torch.device, policy: PairPolicy, stopwatch: Callable[[], Stopwatch]
) -> tuple[tuple[float, ...], float]:
    size = policy.gpu_matrix if device.type == "cuda" else policy.cpu_matrix
    torch.backends.cuda.matmul.allow_tf32 = True
    draw = torch.Generator().manual_seed(size)
    a, b = (torch.randint(-2, 3, (size, size), generator=draw).to(device, torch.float32) for _ in range(2))
    expected = a @ b  # includes the additional cost of a first call
    _verify_product(a, b, expected, device)
    blocks, waited = [], []
    for _ in range(policy.blocks):
        watch, count = stopwatch(), 0
        # a busy machine may let this process begin only after the block's time
        while count == 0 or watch.wall_s < policy.block_s:
            if not torch.equal(a @ b, expected):
                raise WrongResult(f"a matrix product on {name_of(device)} differs from the same product before")
            count += 1
        ours, waiting = watch.split()
        blocks.append(ours / count)
        waited.append(waiting / (ours + waiting))
    return tuple(blocks), round(sum(waited) / len(waited), 3)


def _verify_product(a: torch.Tensor, b: torch.Tensor, product: torch.Tensor, device: torch.device) -> None:
    """Verify with Freivalds' check and a vector without a zero.

    Any single wrong number shows, and several nearly always.
    """
    vector = torch.arange(1, a.shape[0] + 1, dtype=torch.float64, device=device) % 7 + 1
    if not torch.equal(product.double() @ vector, a.double() @ (b.double() @ vector)):
        raise WrongResult(f"a matrix product on {name_of(device)} is wrong")


def join(store: PipeStore, rank: int, policy: PairPolicy) -> Any:
    """Return the pair's process group: NCCL between GPUs, gloo between CPUs. Returns when both are in it."""
    limit = timedelta(seconds=policy.collective_s)
    if devices()[0].type == "cuda":
        torch.cuda.set_device(0)
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = limit
        return nccl(store, rank, 2, options)
    return dist.ProcessGroupGloo(store, rank, 2, limit)


def communicate(group: Any, rank: int, policy: PairPolicy) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the seconds per all-reduce, block by block, and those of them in which this node waited for a CPU.

    Raises WrongResult; RuntimeError where the group fails.
    """
    device = devices()[0]
    size = (policy.gpu_message_bytes if device.type == "cuda" else policy.cpu_message_bytes) // 4
    pattern = torch.arange(size, device=device, dtype=torch.float32) % _PATTERN
    message, expected = pattern * (rank + 1), pattern * 3

    def all_reduce() -> None:
        data = message.clone()
        group.allreduce([data]).wait()
        if not torch.equal(data, expected):  # waits for the device, too
            raise WrongResult("an all-reduce gave a wrong sum")

    all_reduce()  # connects, and lets the two begin together
    blocks, delays = [], []
    for _ in range(policy.blocks):
        watch = Stopwatch()
        for _ in range(policy.messages_per_block):
            all_reduce()
        wall = watch.wall_s
        blocks.append(wall / policy.messages_per_block)
        delays.append(watch.split()[1] / policy.messages_per_block)
    return tuple(blocks), tuple(delays)
