"""What saving costs a training loop: wall time of blocks of steps with a save at each, and of as many without.

    python benchmarks/checkpoint_training.py [--megabytes 1000] [--threads 1] [--processes 1] [--pairs 20] [--json FILE]

Each method trains the same model with AdamW, in a process of its own (or two that share the state), and takes blocks
with and without saves in turn. ``blocked``: by how much a step with a save takes longer, per GB of the state; ``in a
drain``: the median step while a save is on its way to disk, as a multiple of the median step without saves;
``fence``: the longest that an optimizer waited for copies. With ``--threads`` as many as there are cores, no core is
spare.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from checkpoint_methods import METHODS
from measure import machine, shown

TIMEOUT_S = 1800.0
WIDTH = 1024
BATCH = 48
OURS = ("ours", "ours, overlapped")
PEERS = tuple(name for name in METHODS if name not in ("limit", "ours"))
Save = Callable[[int], Callable[[], None]]


def model_of(megabytes: int) -> tuple[Any, Any]:
    """A model and its AdamW whose tensors take so many MB together: a third each for weights and both moments."""
    import torch

    layers = max(1, round(megabytes * 1e6 / 12 / WIDTH / WIDTH))
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=False)


def step(model: Any, optimizer: Any) -> None:
    import torch

    model(torch.rand(BATCH, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Fences:
    """How long optimizers wait for our copies."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []

    def watch(self, checkpointer: Any) -> None:
        fence = checkpointer.fence

        def watched() -> None:
            began = time.perf_counter()
            fence()
            self.waits_s.append(time.perf_counter() - began)

        checkpointer.fence = watched


def saver(name: str, directory: Path, model: Any, optimizer: Any, fences: Fences) -> Save:
    if name in OURS:
        from resilio_hpc import ckpt

        checkpointer = ckpt.Checkpointer(directory, keep_last=1, overlap=name != "ours")
        fences.watch(checkpointer)

        def save(number: int) -> Callable[[], None]:
            handle = checkpointer.save(number, {"model": model, "optimizer": optimizer})
            return lambda: handle.wait("committed", 600)

        return save
    state = dict(model.state_dict())
    for index, values in optimizer.state_dict()["state"].items():
        state |= {f"{index}.{key}": value for key, value in values.items() if key != "step"}
    return METHODS[name](directory, state).save


def measure(name: str, directory: Path, megabytes: int, pairs: int, steps: int) -> dict[str, Any]:
    model, optimizer = model_of(megabytes)
    for _ in range(3):
        step(model, optimizer)
    fences = Fences()
    save = saver(name, directory, model, optimizer, fences)
    number = 0
    found: dict[str, list[float]] = {key: [] for key in ("with", "without", "plain", "draining", "durable", "first")}
    for pair in range(-1, pairs):  # the first one fills arenas and caches
        for saves in (True, False):
            waits: list[tuple[float, Callable[[], None]]] = []
            began = time.perf_counter()
            for _ in range(steps):
                at = time.perf_counter()
                step(model, optimizer)
                took = time.perf_counter() - at
                if pair >= 0:
                    found["draining" if waits else "plain"].append(took) if waits or not saves else None
                if saves:
                    number += 1
                    waits.append((time.perf_counter(), save(number)))
            block = time.perf_counter() - began
            for at, wait in waits[-1:]:
                wait()
                found["durable" if pair >= 0 else "first"].append(time.perf_counter() - at)
            if pair >= 0:
                found["with" if saves else "without"].append(block / steps)
    size = sum(p.nbytes for p in model.parameters()) * 3 / 1e9
    return {**found, "fence": fences.waits_s, "gigabytes": size}


def run(name: str, options: argparse.Namespace) -> dict[str, Any] | str:
    """All processes of one method; the measurements of the slowest, or why there are none."""
    parent = Path(tempfile.mkdtemp(prefix="checkpoint-training-", dir=options.directory))
    argv = [sys.executable, __file__, "--child", name, "--megabytes", str(options.megabytes // options.processes)]
    argv += ["--pairs", str(options.pairs), "--steps", str(options.steps), "--directory", str(parent)]
    places = [
        {"RANK": str(rank), "WORLD_SIZE": str(options.processes), "LOCAL_WORLD_SIZE": str(options.processes)}
        for rank in range(options.processes)
    ]
    children = []
    for place in places:
        environment = os.environ | place | {"OMP_NUM_THREADS": str(options.threads)}
        children.append(
            subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        )
    try:
        results = []
        for child in children:
            out, error = child.communicate(timeout=TIMEOUT_S)
            if child.returncode != 0:
                return (error.strip().splitlines() or ["no word"])[-1][:120]
            results.append(json.loads(out.splitlines()[-1]))
        return max(results, key=lambda result: sum(result["with"]))
    except subprocess.TimeoutExpired:
        return f"not done within {TIMEOUT_S:g} s"
    finally:
        for child in children:
            child.kill()
            child.wait()
        shutil.rmtree(parent, ignore_errors=True)


def row(name: str, found: dict[str, Any]) -> list[str]:
    extra = [a - b for a, b in zip(found["with"], found["without"], strict=True)]
    low, middle, high = statistics.quantiles(extra, n=4) if len(extra) > 1 else extra * 3
    each = found["gigabytes"]
    plain = statistics.median(found["plain"])
    draining = f"{statistics.median(found['draining']) / plain:.2f}" if found["draining"] else "–"
    waits = [wait for wait in found["fence"] if wait > 0]
    return [
        name,
        shown(plain),
        f"{middle / each:.4f} ({low / each:.4f} … {high / each:.4f})",
        draining,
        f"{max(waits) * 1e3:.1f}" if waits else "–",
        shown(statistics.median(found["durable"])),
        shown(found["first"][0]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, metavar="N", help="state of all processes (1000)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads that train, per process (1)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="that share the state (1)")
    parser.add_argument("--pairs", type=int, default=20, metavar="N", help="blocks with and without saves (20 each)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="of a block (3)")
    parser.add_argument("--only", nargs="+", choices=(*OURS, *PEERS), default=[*OURS, *PEERS], metavar="METHOD")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="on the disk to be measured (here)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every timing there")
    parser.add_argument("--child", metavar="METHOD", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        result = measure(options.child, options.directory, options.megabytes, options.pairs, options.steps)
        print(json.dumps(result), flush=True)
        os._exit(0)  # the helpers of some methods do not end by themselves
    console = Console(width=None if sys.stdout.isatty() else 120)
    title = f"{options.megabytes} MB, {options.processes} process(es) of {options.threads} thread(s): seconds, medians"
    table = Table(title=title, title_justify="left")
    for column in ("", "step", "blocked/GB (quartiles)", "in a drain", "fence, ms", "durable", "first"):
        table.add_column(column, no_wrap=True)
    results: dict[str, Any] = {}
    for name in options.only:
        found = run(name, options)
        if isinstance(found, str):
            console.print(f"  {name} is left out: {found}")
            continue
        results[name] = found
        table.add_row(*row(name, found))
        console.print(f"  {name}: done")
    console.print(table)
    if options.json:
        about = {"machine": machine(), "megabytes": options.megabytes, "threads": options.threads}
        options.json.write_text(json.dumps({**about, "processes": options.processes, "results": results}))


if __name__ == "__main__":
    main()
