"""Ends what a rank waits for in its communication libraries, from another thread.

Gloo: its connections are shut down, and each collective fails (torch's ``abort`` and ``shutdown`` do not wake a thread
that waits in one; seen with 2.13). NCCL: torch aborts all communicators as one group. The rendezvous store: its
connection is shut down, too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from resilio_hpc.core import gloo_groups


def break_all(environment: Mapping[str, str]) -> None:
    """End it. ``environment``: names the store. May be called again: a group may have been made meanwhile."""
    _abort_nccl()
    for descriptor, what in gloo_groups.connections().items():
        _shut_down(descriptor, what)
    port = environment.get("MASTER_PORT", "")
    if port.isdecimal():
        _leave_store(int(port))


def leave_groups() -> None:
    """Destroy torch's process groups, which are broken, so that others can be made. In the thread that used them."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return
    if distributed.is_initialized():
        distributed.destroy_process_group()
    # groups are named by a counter, and one that could not be made has counted: new processes begin at 0
    world = getattr(distributed.distributed_c10d, "_world", None)
    if world is not None:
        world.group_count = 0


def waits_in_gloo(thread: int) -> bool:
    """Return whether a thread is inside of a call of torch.distributed, where all groups are gloo's."""
    frame = sys._current_frames().get(thread)
    backends = _backends()
    inside = frame is not None and frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d"
    return inside and bool(backends) and all("nccl" not in backend for backend in backends)


def _backends() -> set[str]:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return set()
    return {str(backend) for backend, _ in distributed.distributed_c10d._world.pg_map.values()}


def _abort_nccl() -> None:
    """Abort NCCL's communicators. Never run on a GPU so far."""
    backends = _backends()
    abort = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_abort_process_group", None)
    if abort is not None and any("nccl" in backend for backend in backends):
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # another thread has destroyed it
            abort()


def _shut_down(descriptor: int, what: str) -> None:
    """Shut a connection down, if the descriptor is still what it was. A listening socket stays: gloo would abort."""
    with contextlib.suppress(OSError), _copy_of(descriptor) as copy:
        is_same = os.readlink(f"/proc/self/fd/{copy.fileno()}") == what  # noqa: PTH115 - no path of a file
        if is_same and not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            copy.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _copy_of(descriptor: int) -> Iterator[socket.socket]:
    """Yield a descriptor of its own for a socket. Raises OSError where it is another kind of file by now."""
    number = os.dup(descriptor)
    try:
        copy = socket.socket(fileno=number)
    except OSError:
        os.close(number)  # a file that stays open stays locked, and keeps its memory
        raise
    with copy:
        yield copy


def _leave_store(port: int) -> None:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names, not paths
        with contextlib.suppress(OSError):
            what = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
            if not what.startswith("socket:"):
                continue
            with _copy_of(int(name)) as copy:
                is_store = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getpeername()[1] == port
            if is_store:
                _shut_down(int(name), what)
