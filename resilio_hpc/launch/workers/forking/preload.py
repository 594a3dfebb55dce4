"""What the zygote imports before it forks ranks, and whether it may fork at all.

Measured with torch 2.13 on the CPU: importing torch takes 1.3-1.8 s, ``torch._dynamo`` (which the first optimizer
imports) another 1.2 s; after the modules below, a rank's path to its first AdamW step under DDP, restored from a
checkpoint, imports nothing new. No forward or backward pass is run here: it would start OpenMP's or autograd's threads,
which a fork would not copy.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from resilio_hpc.core import gloo_groups
from resilio_hpc.launch.process import process_tree
from resilio_hpc.launch.workers.forking import rank_main, script_scan

TORCH_MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch._dynamo",
    "torch.utils.data",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
)
OPTIONAL_MODULES = (
    # late, since the modules above import torch; names differ between versions of torch
    "resilio_hpc.launch.workers.output.error_file",
    "numpy",
    "numpy.random",
    "multiprocessing.queues",
    "multiprocessing.synchronize",
    "multiprocessing.popen_fork",
    "multiprocessing.popen_spawn_posix",
    "multiprocessing.resource_sharer",
    "encodings.ascii",
)


OPTIONAL_TORCH_MODULES = ("torch.profiler._cupti_monitor",)
OWN_MODULES = ("resilio_hpc.train", "resilio_hpc.ckpt")  # importing them takes 0.1 s of each restart


INSTALLED = ("site-packages", "dist-packages")


def own_places(place: str, python_path: str) -> list[str]:
    """Return directories whose modules are the user's own.

    A site's modules may put installed libraries on PYTHONPATH.
    """
    entries = [Path(entry).absolute() for entry in python_path.split(os.pathsep) if entry]
    own = [str(entry) for entry in entries if entry.name not in INSTALLED]
    return [place, *own] if place else own


def why_not_load(kind: str, program: str, place: str, preload: Sequence[str], torch: bool) -> str:
    """Return "" if ranks may find torch loaded, else the program's settings that would come too late, in one line.

    ``place``: the first entry of the program's path, which holds its own modules.
    """
    loaded = {"torch" if torch else "numpy", *(name.partition(".")[0] for name in preload)}
    places = own_places(place, os.environ.get("PYTHONPATH", ""))
    files: list[Path] = []
    if kind == "module":
        files = script_scan.files_of_module(program, places)
    elif kind == "script":
        files = [Path(program, "__main__.py") if rank_main.is_package(program) else Path(program)]
    names = script_scan.settings(files, places, loaded, os.environ, bool(preload))
    return f"{program} sets {', '.join(names)} before it imports {' or '.join(sorted(loaded))}" if names else ""


def import_all(preload: Sequence[str], torch: bool = True, place: str = "") -> str:
    """Import torch's modules, then ``preload``, which may be in ``place``.

    Return "" or, in one line, which module failed and why.
    """
    gc.disable()
    try:
        for name in TORCH_MODULES if torch else ():
            if failed := _import(name):
                return failed
        for name in OWN_MODULES if torch else ():
            if failed := _import(name):
                return failed
        if place:
            sys.path.insert(0, place)
        for name in preload:
            if failed := _import(name):
                return failed
        if place:
            sys.path.remove(place)
        for name in (*OPTIONAL_MODULES, *(OPTIONAL_TORCH_MODULES if torch else ())):
            try:
                importlib.import_module(name)
            except ImportError:
                continue
        gloo_groups.keep_alive()
        return ""
    finally:
        gc.enable()


def _import(name: str) -> str:
    try:
        module = importlib.import_module(name)
        if (
            name.partition(".")[0] == "resilio_hpc"
        ):  # it loads parts on demand; the __all__ of other modules may be very long
            for public in getattr(module, "__all__", ()):
                getattr(module, public)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's module may raise anything
        return f"preloading {name} failed: {type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def why_not_fork(place: str = "") -> str:
    """Return "" if ranks may be forked from this process, or the reason against it in one line.

    ``place``: the first entry of the program's path. numpy's OpenBLAS starts threads on import and stops them in a
    pthread_atfork handler, so one throw-away fork comes first: a thread that is still there afterwards belongs to code
    that is not prepared for forks.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about forks of processes with threads
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    threads = thread_names()
    if len(threads) > 1:
        return f"a preloaded module started threads ({len(threads) - 1}: {', '.join(sorted(set(threads[1:])))})"
    left = process_tree.children(os.getpid())
    if left:
        return f"a preloaded module started processes ({', '.join(map(str, left))})"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "a preloaded module initialised CUDA"
    others = rank_main.shadowed([place]) if place else []
    if others:
        return f"{place} has another {others[0]} than the one that is loaded"
    return ""


def thread_names() -> list[str]:
    """Return the names of this process's threads, the main thread's first."""
    names = []
    for task in sorted(int(entry.name) for entry in Path("/proc/self/task").iterdir()):
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                names.append(file.read().strip())
        except OSError:
            continue
    return names
