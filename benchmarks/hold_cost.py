"""What it costs at each step to be able to save the last finished one: microseconds, by the number of parameters.

    python benchmarks/hold_cost.py

*held*: at the boundary, as ``run.steps`` does with ``checkpoint.saver(state)``. *recorded*: what layout REPLICATED adds
there and before the optimizer's step: a rank's own part, with generators of Python, numpy and torch, in shared memory.
*generators*: ``rng_state()`` alone, which a state with generators takes in any save. *saved*: milliseconds for the
snapshot of the last step, when ranks cannot go on, beside the bare copy of as many bytes. Medians, quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy
import torch
from rich.console import Console
from rich.table import Table

from resilio_hpc.ckpt import rng_state
from resilio_hpc.ckpt.snapshot.arena_writer import ArenaPair, Owner
from resilio_hpc.ckpt.snapshot.boundary_record import RecordWriter
from resilio_hpc.ckpt.snapshot.snapshot import Snapshot, copy_threads
from resilio_hpc.ckpt.state.held_state import HeldState
from resilio_hpc.ckpt.state.own_part import own_part

LAYERS = (1, 12, 96)  # of 12 parameters each
TIMES = 60
OWNER = Owner(0, 0, 1, 1, 0, "replicated", "run")


def timed(act: Callable[[], object]) -> float:
    """Return microseconds."""
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1e6


def boundary(layers: int, directory: Path) -> dict[str, list[float]]:
    """Measure boundaries of a model; each kind of work in turn, so that a noisy moment hits all of them."""
    model = torch.nn.ModuleList([torch.nn.TransformerEncoderLayer(64, 4, 128) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()

    def state() -> dict[str, object]:
        return {"model": model, "optimizer": optimizer, "random": rng_state(), "epoch": 3}

    held = HeldState(0, state())
    writer = RecordWriter(directory, 0, 1, 0)
    times: dict[str, list[float]] = {"held": [], "recorded": [], "generators": []}

    def hold(step: int) -> None:
        nonlocal held
        held = HeldState(step, state(), held.watched)

    def record(step: int) -> None:
        writer.write(step, held.own_part(), False)
        writer.write(step + 1, own_part(state()), True)

    for step in range(TIMES):
        torch.rand(1), numpy.random.rand()
        times["held"].append(timed(partial(hold, step)))
        times["recorded"].append(timed(partial(record, step)))
        times["generators"].append(timed(rng_state))
    return times


def last_step(mb: int, directory: Path) -> dict[str, list[float]]:
    """Measure the snapshot of the last step, and a copy of as many bytes, in turn."""
    weight = torch.nn.Parameter(torch.rand(mb * 250_000))
    optimizer = torch.optim.SGD([weight])
    pool = ThreadPoolExecutor(copy_threads(1))
    target = torch.empty_like(weight.detach())
    target.zero_()
    times: dict[str, list[float]] = {"saved": [], "bare copy": []}

    def save(pair: ArenaPair, held: HeldState) -> None:
        Snapshot(pair, held.step, held.flattened(), pool, is_last=True).finish()

    for step in range(5):
        held = HeldState(step, {"weight": weight, "optimizer": optimizer})
        pair = ArenaPair(directory, OWNER, directory)
        times["saved"].append(timed(partial(save, pair, held)))
        times["bare copy"].append(timed(partial(target.copy_, weight.detach())))
        pair.close()
        for path in directory.glob("rank0.slot*"):
            path.unlink()
    return times


def quartiles(values: list[float], unit: float) -> str:
    """Return the median, and the quartiles in brackets."""
    low, middle, high = (value / unit for value in statistics.quantiles(values, n=4))
    return f"{middle:.0f} ({low:.0f} … {high:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1000, help="of the last step's state")
    options = parser.parse_args()
    results: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="resilio-hold-") as name:
        for layers in LAYERS:
            results[f"{12 * layers} parameters"] = boundary(layers, Path(name))
        results[f"{options.mb} MB"] = last_step(options.mb, Path(name))
    table = Table("", *("held, us", "recorded, us", "generators, us", "saved, ms", "bare copy, ms"))
    for what, times in results.items():
        kinds = ("held", "recorded", "generators", "saved", "bare copy")
        unit = 1e3 if what.endswith("MB") else 1
        table.add_row(what, *(quartiles(times[kind], unit) if kind in times else "" for kind in kinds))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
