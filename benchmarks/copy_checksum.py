"""What a checksum adds to a copy into an arena: ours, with what different processors have for CRC32C, beside memcpy.

    python benchmarks/copy_checksum.py [--megabytes 1000] [--rounds 7]

Seconds per GB from private memory in small pages, as torch's tensors are, into shared memory that is there; all ways in
turn, by one thread and by two. ``memcpy`` computes no checksum; ``checksum`` copies nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from rich.table import Table

from resilio_hpc.native import _memory, crc32c
from resilio_hpc.native.portable.memory import copy_blocks

BLOCK = 1 << 20
WAYS = ("tables", "instruction for CRC32C", "carry-less products")


def ways(source: memoryview, target: memoryview) -> Iterator[tuple[str, Callable[[list[int]], object]]]:
    """Name, and what takes the blocks that begin there."""
    to, from_ = (ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (target, source))

    def memcpy(starts: list[int]) -> None:
        for at in starts:
            ctypes.memmove(to + at, from_ + at, BLOCK)

    def checksum(starts: list[int]) -> None:
        for at in starts:
            crc32c(source[at : at + BLOCK])

    def copy_with(instructions: int) -> Callable[[list[int]], object]:
        def copy(starts: list[int]) -> object:
            _memory.use(instructions)
            return _memory.copy_blocks(target, [(at, source, at, BLOCK) for at in starts])

        return copy

    def portable(starts: list[int]) -> object:
        return copy_blocks(target, [(at, source, at, BLOCK) for at in starts])

    yield "memcpy", memcpy
    yield "checksum", checksum
    for instructions in range(_memory.available + 1):
        yield f"copy with checksum, {WAYS[instructions]}", copy_with(instructions)
    yield "copy with checksum, without the extension", portable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, metavar="N", help="to be copied (1000)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="of all ways in turn (7)")
    options = parser.parse_args()
    size = max(2, options.megabytes * 1_000_000 // BLOCK) * BLOCK
    source = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    target = memoryview(mmap.mmap(-1, size))
    for memory in (source, target):
        for at in range(0, size, mmap.PAGESIZE):
            memory[at] = at >> 12 & 255
    starts = list(range(0, size, BLOCK))
    took: dict[tuple[str, int], list[float]] = {}
    with ThreadPoolExecutor(2) as pool:
        for _ in range(options.rounds):
            for name, act in ways(source, target):
                for threads in (1, 2):
                    began = time.perf_counter()
                    list(pool.map(act, [starts[number::threads] for number in range(threads)]))
                    took.setdefault((name, threads), []).append((time.perf_counter() - began) / size * 1e9)
                _memory.use(_memory.available)
    table = Table(title=f"{options.megabytes} MB: seconds per GB (quartiles)", title_justify="left")
    for column in ("", "one thread", "two threads"):
        table.add_column(column, no_wrap=True)
    for name, _ in ways(source, target):
        cells = []
        for threads in (1, 2):
            low, middle, high = statistics.quantiles(took[name, threads], n=4)
            cells.append(f"{middle:.3f} ({low:.3f} … {high:.3f})")
        table.add_row(name, *cells)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
