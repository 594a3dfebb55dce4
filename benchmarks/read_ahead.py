"""What reading ahead saves: a cold restore after a while of initialisation, with and without it, taken in turn.

    python benchmarks/read_ahead.py [--megabytes 1000] [--rounds 5] [--json FILE]

One process with numpy arrays. The time of a restore begins when the script asks for it; ``initialisation`` is how long
after its start that is (here it only sleeps).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from checkpoint_methods import drop_caches
from measure import machine, shown

TENSORS = 48
INITIALISATION_S = (0.25, 0.5, 1.0, 2.0)


def restore(directory: Path, step: int, state: Any, ahead: bool, initialisation_s: float) -> float:
    from resilio_hpc.ckpt import Checkpointer
    from resilio_hpc.ckpt.coordination.local_coordinator import LocalCoordinator
    from resilio_hpc.ckpt.restore.read_ahead import ReadAhead

    begun = directory / "begun"
    begun.unlink(missing_ok=True)
    LocalCoordinator.read_ahead = begun
    checkpointer = Checkpointer(directory)
    drop_caches()
    reader = None
    if ahead:
        request = msgspec.json.encode(ReadAhead(str(directory), step, 1, (0,), str(begun))).decode()
        argv = [sys.executable, "-m", "resilio_hpc.ckpt.restore.read_ahead", request]
        reader = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    time.sleep(initialisation_s)
    began = time.perf_counter()
    assert checkpointer.restore(state, step) is not None
    seconds = time.perf_counter() - began
    if reader is not None:
        reader.wait()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, metavar="N", help="size of the state (1000)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="restores of each kind (5)")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="on the disk to be measured (here)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every timing there")
    options = parser.parse_args()
    import numpy

    from resilio_hpc.ckpt import Checkpointer

    state = {f"layer.{n}": numpy.full(options.megabytes * 1_000_000 // 8 // TENSORS, n) for n in range(TENSORS)}
    directory = Path(tempfile.mkdtemp(prefix="read-ahead-", dir=options.directory))
    found: dict[str, list[float]] = {}
    try:
        Checkpointer(directory).save(1, state).wait("committed", 300)
        for _ in range(options.rounds):
            for initialisation_s in INITIALISATION_S:
                for ahead in (False, True):
                    name = f"{initialisation_s:g}{' ahead' if ahead else ''}"
                    found.setdefault(name, []).append(restore(directory, 1, state, ahead, initialisation_s))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    title = f"Restore of {options.megabytes} MB from a cold disk: seconds, median (least … most)"
    table = Table(title=title, title_justify="left")
    for column in ("initialisation, s", "not read ahead", "read ahead"):
        table.add_column(column, no_wrap=True)
    for initialisation_s in INITIALISATION_S:
        cells = [found[f"{initialisation_s:g}"], found[f"{initialisation_s:g} ahead"]]
        spread = [f"{shown(statistics.median(c))} ({shown(min(c))} … {shown(max(c))})" for c in cells]
        table.add_row(f"{initialisation_s:g}", *spread)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "megabytes": options.megabytes, "results": found}))
    os._exit(0)  # the saver has nothing left to do


if __name__ == "__main__":
    main()
