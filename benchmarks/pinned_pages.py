"""How long the kernel takes to pin a snapshot's memory, as a registration for RDMA does: huge pages and small ones.

    python benchmarks/pinned_pages.py [--megabytes 1024] [--rounds 11] [--json FILE]

There is no hardware for RDMA here, so the memory is registered as a buffer of io_uring, which pins its pages by the
same function of the kernel (pin_user_pages). What an adapter's own tables take comes on top. Arenas are allocated as
in a save, in turn in both ways; each is pinned once.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from measure import machine
from resilio_hpc.ckpt.snapshot import huge_memory
from resilio_hpc.native import map_shared, populate

IO_URING_SETUP, IO_URING_REGISTER = 425, 427
REGISTER_BUFFERS, UNREGISTER_BUFFERS = 0, 1
LIBC = ctypes.CDLL(None, use_errno=True)


class IoVector(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


def call(*arguments: object) -> int:
    """Make a system call. Raises OSError."""
    found: int = LIBC.syscall(*arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


@contextmanager
def arena(size: int, in_huge_pages: bool) -> Iterator[memoryview]:
    """Make an arena, all of whose pages are present."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(size)
        memory = map_shared(file.fileno(), size, True)
        if huge_memory.allocate(file.fileno(), memory, 0, size, in_huge_pages) != in_huge_pages:
            raise SystemExit("pinned_pages: this kernel gives shared memory no huge pages (resilio doctor huge-pages)")
        populate(memory)
        yield memory


def pinned_s(ring: int, memory: memoryview) -> float:
    """Return how long it takes to pin memory; it is unpinned again."""
    base = ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))
    vector = IoVector(base, len(memory))
    began = time.perf_counter()
    call(IO_URING_REGISTER, ring, REGISTER_BUFFERS, ctypes.byref(vector), 1)
    took = time.perf_counter() - began
    call(IO_URING_REGISTER, ring, UNREGISTER_BUFFERS, None, 0)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024, metavar="N", help="1024 at most, in MiB (1024)")
    parser.add_argument("--rounds", type=int, default=11, metavar="N", help="how often each is measured (11)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every value here")
    options = parser.parse_args()
    ring = call(IO_URING_SETUP, 8, ctypes.create_string_buffer(120))
    found: dict[str, list[float]] = {"huge pages": [], "small pages": []}
    for _ in range(options.rounds):
        for kind, values in found.items():
            with arena(options.megabytes << 20, kind == "huge pages") as memory:
                values.append(pinned_s(ring, memory))
    os.close(ring)
    for kind, values in found.items():
        low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        Console().print(
            f"{options.megabytes} MiB in {kind}: pinned in {1e3 * median:.2f} ms ({1e3 * low:.2f} … {1e3 * high:.2f})"
        )
    if options.json:
        options.json.write_text(
            json.dumps({"machine": machine(), "megabytes": options.megabytes, "s": found}, indent=1)
        )


if __name__ == "__main__":
    main()
