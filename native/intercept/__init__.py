"""Libraries that are loaded before a program's own, one for each communication library that they watch.

They are no modules of Python: ``library`` names the file for LD_PRELOAD. Each notes a call and passes it on (RES-2).
"""

from importlib.util import find_spec

FAMILIES = ("gloo", "mpi", "nccl")


def library(family: str) -> str | None:
    """Return the path of a family's library; None where it was not built."""
    spec = find_spec(f"resilio_hpc.native.intercept.{family}")
    return spec.origin if spec is not None else None
