"""Libraries that are loaded before a program's own, one for each communication or GPU library that they watch.

They are no modules of Python: ``library`` names the file for LD_PRELOAD. Each notes a call and passes it on (RES-2).
"""

import contextlib
import ctypes
import os
from importlib.util import find_spec
from pathlib import Path

CALLS_VARIABLE = "RESILIO_CALLS"
"""In a rank's environment: the file in which its calls are noted."""
FAMILIES = ("cublas", "cuda", "gloo", "hip", "mpi", "nccl")
GPU_FAMILIES = {"cuda": "dev/nvidiactl", "cublas": "dev/nvidiactl", "hip": "dev/kfd"}  # and the device file of each


def library(family: str) -> str | None:
    """Return the path of a family's library; None where it was not built."""
    spec = find_spec(f"resilio_hpc.native.intercept.{family}")
    return spec.origin if spec is not None else None


def is_useful(family: str, root: Path = Path("/")) -> bool:
    """Return whether this node may use the family: without the GPU's device file it does not."""
    return family not in GPU_FAMILIES or (root / GPU_FAMILIES[family]).exists()


def begin_round(before: str, after: str) -> None:
    """Forget the calls of this process so far, and call their file ``after``, too: it enters another round."""
    begin = getattr(ctypes.CDLL(None), "resilio_begin_round_2", None)
    if begin is None or not before or not after:
        return
    begin()
    with contextlib.suppress(OSError):  # no call was noted
        os.link(before, after, follow_symlinks=False)
