"""How a training script fails: with the texts of real GPU and NCCL errors, which no GPU is needed for."""

from __future__ import annotations

import os
import sys

TEXTS = {
    "gpu-memory": (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.15 GiB of which 1.12 GiB is "
        "free. Including non-PyTorch memory, this process has 78.02 GiB memory in use. Of the allocated memory 76.10 "
        "GiB is allocated by PyTorch, and 1.20 GiB is reserved by PyTorch but unallocated."
    ),
    "gpu-memory-of-others": (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.15 GiB of which 1.12 GiB is "
        "free. Process 1893021 has 70.31 GiB memory in use. Including non-PyTorch memory, this process has 7.70 GiB "
        "memory in use."
    ),
    "gpu-sick": (
        "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported at some "
        "other API call, so the stacktrace below might be incorrect."
    ),
    "nccl": (
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled system error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nncclSystemError: System call (e.g. socket, malloc) or "
        "external library call failed or device error."
    ),
    "bug": "planted: the same mistake in each life",
}
"""Texts of exceptions."""
WATCHDOG = (
    "[rank1]:[E1128 02:12:31.417 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=604, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600041 milliseconds "
    "before timing out.\n"
    "[rank1]:[E1128 02:12:31.418 ProcessGroupNCCL.cpp:681] [Rank 1] To avoid data inconsistency, we are taking the "
    "entire process down.\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
)
FAILS = (*TEXTS, "nccl-watchdog")


def fail(kind: str) -> None:
    """Fail in this way."""
    if kind == "nccl-watchdog":  # no exception is left, only what stands in the log
        sys.stderr.write(WATCHDOG)
        sys.stderr.flush()
        os.abort()
    raise RuntimeError(TEXTS[kind])
