"""What a load in another layout costs beside one in the layout of the save: cold cache, all processes at once.

    python benchmarks/checkpoint_layouts.py [--megabytes 1000] [--rounds 5] [--json FILE]

Tensors of numpy are cut into grids of processes. Each load is made by as many processes as its grid has; what counts is
the time until the last of them has everything. The layouts are taken in turn. Then the same tensors are restored whole
by several processes each, as replicas do.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from checkpoint_methods import drop_caches
from measure import machine, shown
from resilio_hpc.native import populate

COLUMNS, TENSORS = 2048, 12
SAVES = ((4, 1), (2, 2), (1, 4))
LOADS = ((4, 1), (2, 2), (1, 4), (3, 1), (2, 1), (1, 1))
TIMEOUT_S = 300.0
REPLICAS = (1, 2, 4)
Grid = tuple[int, int]


def part(shape: tuple[int, int], grid: Grid, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where rank's part begins, and its shape."""
    place = list(product(range(grid[0]), range(grid[1])))[rank]
    first = tuple(length * at // parts for length, parts, at in zip(shape, grid, place, strict=True))
    end = tuple(length * (at + 1) // parts for length, parts, at in zip(shape, grid, place, strict=True))
    return (first[0], first[1]), (end[0] - first[0], end[1] - first[1])


def child(act: str, directory: Path, rows: int, grid: Grid, rank: int) -> None:
    """One process: makes its state, says that it is ready, waits for a line, saves or loads, tells the seconds."""
    import numpy

    from resilio_hpc.ckpt import REPLICATED, Checkpointer, Slab

    shape = (rows, COLUMNS)
    whole = act.startswith("whole-")
    first, mine = ((0, 0), shape) if whole else part(shape, grid, rank)
    state: dict[str, Any] = {}
    for number in range(TENSORS):
        local = numpy.full(mine, -1.0, dtype=numpy.float32)  # memory that is there, as in a model that was built
        if act.endswith("save"):
            local[:] = numpy.arange(first[0], first[0] + mine[0], dtype=numpy.float32)[:, None] + number
        state[f"layer.{number}"] = local if whole else Slab(local, shape, first)
    checkpoint = Checkpointer(directory, layout=REPLICATED) if whole else Checkpointer(directory)
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.perf_counter()
    if act.endswith("save"):
        checkpoint.save(1, state).wait("committed", TIMEOUT_S)
    else:
        assert checkpoint.restore(state) is not None
    seconds = time.perf_counter() - began
    if act.endswith("load"):
        for number, found in enumerate(state.values()):
            local = found if whole else found.tensor
            expected = numpy.arange(first[0], first[0] + mine[0], dtype=numpy.float32) + number
            assert (local[:, 0] == expected).all() and (local[:, -1] == expected).all()
    print(seconds, flush=True)


def take_memory(size: int) -> None:
    """Have so many bytes of free memory that were used before.

    A virtual machine gives free memory back to its host. To get a GB of it again takes up to four seconds, and which
    load meets that is chance.
    """
    with mmap.mmap(-1, size) as memory:
        populate(memoryview(memory))


def together(act: str, directory: Path, rows: int, grid: Grid) -> float:
    """All processes of a layout; seconds until the last one was done."""
    world = grid[0] * grid[1]
    children = []
    for rank in range(world):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        argv = [sys.executable, __file__, "--child", act, str(directory), str(rows), *map(str, grid), str(rank)]
        children.append(
            subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | place, bufsize=1
            )
        )
    try:
        for one in children:
            assert one.stdout is not None
            if one.stdout.readline() != "ready\n":
                raise SystemExit("a process did not start")
        drop_caches()
        take_memory(3 * 4 * rows * COLUMNS * TENSORS)
        for one in children:
            assert one.stdin is not None
            one.stdin.write("go\n")
        return max(float(one.communicate(timeout=TIMEOUT_S)[0]) for one in children)
    finally:
        for one in children:
            one.kill()
            one.wait()


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        act, directory, rows, high, wide, rank = sys.argv[2:]
        child(act, Path(directory), int(rows), (int(high), int(wide)), int(rank))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, metavar="N", help="of all tensors (1000)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="loads of each kind (5)")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="on the disk to be measured (here)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every timing there")
    options = parser.parse_args()
    rows = max(16, round(options.megabytes * 1e6 / 4 / COLUMNS / TENSORS))
    console, results = Console(width=None if sys.stdout.isatty() else 120), dict[str, dict[str, Any]]()
    parent = Path(tempfile.mkdtemp(prefix="checkpoint-layouts-", dir=options.directory))
    try:
        for saved in SAVES:
            directory = parent / f"{saved[0]}x{saved[1]}"
            together("save", directory, rows, saved)
            found: dict[Grid, list[float]] = {grid: [] for grid in LOADS}
            for _ in range(options.rounds):
                for grid, seconds in found.items():
                    seconds.append(together("load", directory, rows, grid))
            results[f"{saved[0]}x{saved[1]}"] = {f"{high}x{wide}": found[high, wide] for high, wide in LOADS}
            console.print(f"  saved as {saved[0]}x{saved[1]}: done")
        together("whole-save", parent / "whole", rows, (1, 1))
        replicas: dict[int, list[float]] = {count: [] for count in REPLICAS}
        for _ in range(options.rounds):
            for count, seconds in replicas.items():
                seconds.append(together("whole-load", parent / "whole", rows, (count, 1)))
    finally:
        shutil.rmtree(parent, ignore_errors=True)
    table = Table(title=f"{options.megabytes} MB: seconds, median (times the load in the layout of the save)")
    for column in ("saved as", *(f"{high}x{wide}" for high, wide in LOADS)):
        table.add_column(column, no_wrap=True)
    for name, loads in results.items():
        plain = statistics.median(loads[name])
        medians = [statistics.median(seconds) for seconds in loads.values()]
        table.add_row(name, *(f"{shown(median)} ({median / plain:.2f})" for median in medians))
    console.print(table)
    for count, seconds in replicas.items():
        console.print(f"all of it by each of {count} processes: {shown(statistics.median(seconds))} s")
    if options.json:
        options.json.write_text(
            json.dumps(
                {"machine": machine(), "megabytes": options.megabytes, "results": results} | {"replicas": replicas}
            )
        )


if __name__ == "__main__":
    main()
