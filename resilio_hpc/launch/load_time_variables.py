"""Environment variables that are read while a process or its libraries load: a forked rank cannot change them.

A table, applied by ``differing``. A rank whose value of one of these differs from its spawner's is executed anew.
"""

from __future__ import annotations

from collections.abc import Mapping

PREFIXES = (
    "LD_",  # dynamic linker: LD_PRELOAD, LD_LIBRARY_PATH, LD_BIND_NOW (ld.so(8))
    "GLIBC_TUNABLES",  # glibc start-up
    "MALLOC_",  # glibc malloc (mallopt(3)); jemalloc reads MALLOC_CONF
    "TCMALLOC_",
    "PYTHON",  # interpreter start-up (python --help-env)
    "LC_",  # the interpreter sets its locale and encodings at start-up
    "LANG",
    "TZ",
    "OMP_",  # libgomp, libiomp and OpenBLAS read these on load
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "GOTO_",
    "BLIS_",
    "THP_MEM_ALLOC_ENABLE",  # c10's CPU allocator, once
    "PYTORCH_",  # allocator settings and the like, most of them in static initialisers
    "TORCH_LOGS",  # torch._logging, on import
    "TORCH_TRACE",
    "TORCH_CPP_LOG_LEVEL",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCHDYNAMO_",  # torch._dynamo.config and torch._inductor.config, on import
    "TORCHINDUCTOR_",
    "TORCH_COMPILE_",
    "NPY_",
)
SET_AFTER_FORK = frozenset({"OMP_NUM_THREADS"})  # a rank's thread counts are set through the libraries' functions


def differing(spawner: Mapping[str, str], rank: Mapping[str, str]) -> list[str]:
    """Names in ``rank`` (what is set on top) whose value needs a new process, sorted."""
    return sorted(
        name
        for name, value in rank.items()
        if name.startswith(PREFIXES) and name not in SET_AFTER_FORK and spawner.get(name) != value
    )
