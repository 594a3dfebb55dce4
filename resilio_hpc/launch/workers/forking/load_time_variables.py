"""Environment variables that are read while a process or its libraries load: a forked rank cannot change them.

There are two tables. A rank whose value of such a variable differs from its spawner's is executed again
(``differing``), and so is one whose script sets a variable of the second table before it imports the library that
reads it (``script_scan``).
"""

from __future__ import annotations

from collections.abc import Mapping

AT_START = (
    "LD_",  # dynamic linker: LD_PRELOAD, LD_LIBRARY_PATH, LD_BIND_NOW (ld.so(8))
    "GLIBC_TUNABLES",  # glibc start-up
    "MALLOC_",  # glibc malloc (mallopt(3)); jemalloc reads MALLOC_CONF
    "TCMALLOC_",
    "PYTHON",  # interpreter start-up (python --help-env)
    "LC_",  # the interpreter sets its locale and encodings at start-up
    "LANG",
    "TZ",
)
BY_LIBRARIES = (
    "OMP_",  # libgomp, libiomp and OpenBLAS read these on load
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "GOTO_",
    "BLIS_",
    "VECLIB_",
    "NUMEXPR_",
    "THP_MEM_ALLOC_ENABLE",  # c10's CPU allocator, once
    "PYTORCH_",  # allocator settings and the like, most of them in static initialisers
    "TORCH",  # torch._logging, torch._dynamo.config, torch._inductor.config on import; c10's logging on load
    "C10_",
    "ATEN_",
    "TRITON_",
    "NPY_",
    "NUMPY_",
    "GLOG_",
    "KINETO_",
)
LATER = (  # when they are needed
    "TORCHELASTIC_", "TORCH_NCCL_", "TORCH_FR_", "TORCH_GLOO_", "TORCH_EXTENSIONS_DIR", "TORCH_HOME",
)  # fmt: skip
SET_AFTER_FORK = frozenset({"OMP_NUM_THREADS"})  # a rank's thread counts are set through the libraries' functions


def read_by_libraries(name: str) -> bool:
    """Return whether torch, or a library that it loads, reads this variable once, on load."""
    return name.startswith(BY_LIBRARIES) and not name.startswith(LATER)


def differing(spawner: Mapping[str, str], rank: Mapping[str, str]) -> list[str]:
    """Return the sorted names in ``rank``, set on top of the spawner's, whose value needs a new process."""
    return sorted(
        name
        for name, value in rank.items()
        if (name.startswith(AT_START) or read_by_libraries(name))
        and name not in SET_AFTER_FORK
        and spawner.get(name) != value
    )
