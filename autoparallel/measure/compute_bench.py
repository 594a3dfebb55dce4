"""Times of a transformer's operators on one GPU, by CUDA events; on a CPU for trying."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from resilio_hpc.autoparallel.measure.compute_samples import KINDS, Sample, Shape
from resilio_hpc.core.errors import UsageError

REPEATS = 7
SAMPLE_S = 0.02
WARM_S = 2.0
"""A GPU is kept busy so long before anything counts: its clocks in training are those under load."""
MOST = 200
"""A sample repeats the operator until it has taken about SAMPLE_S, at most MOST times."""
SHAPES: Mapping[str, Sequence[Shape]] = {
    "matmul": (
        (512, 4096, 4096), (2048, 4096, 4096), (4096, 4096, 4096), (8192, 4096, 4096), (8192, 8192, 8192),
        (8192, 14336, 4096), (8192, 4096, 14336), (8192, 1536, 12288), (16384, 8192, 8192), (4096, 51200, 4096),
    ),
    "attention": ((4, 32, 2048, 128), (1, 32, 8192, 128), (8, 16, 2048, 64), (4, 16, 4096, 64)),
    "attention-cudnn": ((4, 32, 2048, 128), (1, 32, 8192, 128), (8, 16, 2048, 64), (4, 16, 4096, 64)),
    "normalisation": ((8192, 4096), (16384, 8192), (8192, 12288)),
    "optimizer": ((50_000_000,), (200_000_000,)),
}  # fmt: skip
SMALL: Mapping[str, Sequence[Shape]] = {
    "matmul": ((128, 128, 128), (256, 256, 256)),
    "attention": ((1, 2, 128, 64),),
    "normalisation": ((256, 512),),
    "optimizer": ((100_000,),),
}
"""For a CPU, where nothing but the way is tried."""


def shapes_of(device: str) -> Mapping[str, Sequence[Shape]]:
    """Return the shapes to measure there. Raises UsageError for an unknown device."""
    if device not in ("cuda", "cpu"):
        raise UsageError(f"--device {device}: there are cuda and cpu")
    return SMALL if device == "cpu" else SHAPES


def device_of(name: str) -> torch.device:
    """Return the device. Raises UsageError where none has that name."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("this machine has no GPU that torch can use: --device cpu tries the way, and measures no GPU")
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """Return its name for the profile: ``NVIDIA H100 80GB HBM3``, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def torch_version() -> str:
    """Return the version of torch, with that of its CUDA."""
    return f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"


def measure(device: torch.device, shapes: Mapping[str, Sequence[Shape]], tell: Callable[[str], None]) -> list[Sample]:
    """Return every operator's sample, in order.

    One that the GPU has no memory or no kernel for is reported and left out.
    """
    samples = []
    with _quiet(device):
        for kind, rows in shapes.items():
            for shape in rows:
                size = "x".join(map(str, shape))
                try:
                    sample = Sample(kind, shape, tuple(_timed(_OPERATORS[kind](shape, device), device)))
                except torch.OutOfMemoryError:
                    tell(f"{kind:<16} {size:<20} left out: it does not fit into the memory that is free")
                    continue
                except RuntimeError as error:
                    if "No available kernel" not in str(error):
                        raise
                    tell(f"{kind:<16} {size:<20} left out: there is no such kernel here")
                    continue
                samples.append(sample)
                unit = "TFLOP/s" if KINDS[kind].units == "FLOP" else "TB/s"
                tell(f"{kind:<16} {size:<20} {sample.median_s * 1e6:>10.1f} us {sample.rate / 1e12:>9.3f} {unit}")
    return samples


@contextlib.contextmanager
def _quiet(device: torch.device) -> Iterator[None]:
    """Give a GPU at its clocks under load.

    On a CPU one thread, since on a busy machine threads that wait for each other cost more than they gain.
    """
    if device.type != "cpu":
        once = _matmul((8192, 8192, 8192), device)
        began = time.perf_counter()
        while time.perf_counter() - began < WARM_S:
            for _ in range(10):
                once()
            torch.cuda.synchronize(device)
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _timed(once: Callable[[], None], device: torch.device) -> Iterator[float]:
    """Yield seconds per call; the first calls, in which kernels are chosen, do not count."""
    for _ in range(3):
        once()
    first = next(_samples(once, device, 1, 1))
    yield from _samples(once, device, max(1, min(MOST, int(SAMPLE_S / max(first, 1e-7)))), REPEATS)


def _samples(once: Callable[[], None], device: torch.device, times: int, repeats: int) -> Iterator[float]:
    for _ in range(repeats):
        if device.type == "cpu":
            began = time.perf_counter()
            for _ in range(times):
                once()
            yield (time.perf_counter() - began) / times
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(times):
            once()
        end.record()
        end.synchronize()
        yield start.elapsed_time(end) / 1e3 / times


# -- operators: one call of each, its tensors made before ------------------------------------------------------------


def _matmul(shape: Shape, device: torch.device) -> Callable[[], Any]:
    m, n, k = shape
    left = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    right = torch.randn(n, k, device=device, dtype=torch.bfloat16)  # as a linear layer keeps its weights
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    return lambda: torch.mm(left, right.t(), out=out)


def _attention(shape: Shape, device: torch.device, kernel: SDPBackend) -> Callable[[], Any]:
    query, key, value = (torch.randn(*shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    up = torch.randn(*shape, device=device, dtype=torch.bfloat16)

    def once() -> None:
        with sdpa_kernel(kernel):
            result = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(result, (query, key, value), up)

    return once


def _normalisation(shape: Shape, device: torch.device) -> Callable[[], Any]:
    rows, hidden = shape
    values = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16)
    weight, bias = (torch.ones(hidden, device=device, dtype=torch.bfloat16) for _ in range(2))
    return lambda: functional.layer_norm(values, (hidden,), weight, bias)


def _optimizer(shape: Shape, device: torch.device) -> Callable[[], Any]:
    parameter = torch.nn.Parameter(torch.zeros(*shape, device=device))
    parameter.grad = torch.ones(*shape, device=device)
    return torch.optim.AdamW([parameter], fused=True).step


_OPERATORS: Mapping[str, Callable[[Shape, torch.device], Callable[[], Any]]] = {
    "matmul": _matmul,
    "attention": lambda shape, device: _attention(shape, device, SDPBackend.FLASH_ATTENTION),
    "attention-cudnn": lambda shape, device: _attention(shape, device, SDPBackend.CUDNN_ATTENTION),
    "normalisation": _normalisation,
    "optimizer": _optimizer,
}
