"""What saving costs a training loop: wall time of blocks of steps with a save at each, and of as many without.

    benchmarks/peers_setup.sh     # NVRx, torchsnapshot and DLRover, into an environment of their own
    python benchmarks/checkpoint_training.py [--threads 1] [--processes 1] [--rounds 3] [--pairs 7] [--json FILE]

Each method trains the same model with AdamW, in processes of its own (or pairs that share the state), which take blocks
with and without saves in turn; the methods take turns, too, once per round. ``blocked``: by how much a step with a save
takes longer, per GB of the state; ``in a drain``: the median step while a save is on its way to disk, as a multiple of
the median step without saves; ``bare write`` is the limit: another process writes as many bytes, none had to
copy; before ``copy, bare write`` one ``copy_`` of each tensor is made in the place of the save.
``fence``: the longest that an optimizer waited for copies; ``wrong``: tensors that a load after one more save did not
bring back as they were saved. With ``--threads`` as many as there are cores, no core is spare.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bare_writer import BareWriter
from checkpoint_measure import Fingerprint, differing, fingerprint
from checkpoint_methods import METHODS, Method, Place
from checkpoint_peers import PEERS
from checkpoint_processes import join, place, run, tell, tell_failures
from measure import machine, shown

TIMEOUT_S = 1800.0
WIDTH = 1024
LIMITS = ("bare write", "copy, bare write")
OURS = ("ours", "ours, overlapped")
OTHERS = tuple(name for name in METHODS | PEERS if not name.startswith(("limit", "ours")))
NAMES = (*LIMITS, *OURS, *OTHERS)
COLUMNS = ("", "step", "blocked/GB (quartiles)", "in a drain", "fence, ms", "durable", "first", "wrong")


def model_of(megabytes: int) -> tuple[Any, Any]:
    """Return a model and its AdamW whose tensors take so many MB together.

    A third each for weights and both moments.
    """
    import torch

    layers = max(1, round(megabytes * 1e6 / 12 / WIDTH / WIDTH))
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=False)


def step(model: Any, optimizer: Any, batch: int) -> None:
    import torch

    model(torch.rand(batch, WIDTH)).square().mean().backward()
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


def tensors_of(model: Any, optimizer: Any, rank: int) -> dict[str, Any]:
    """Flat, with names that no other process has."""
    state = {f"{rank}.{name}": tensor for name, tensor in model.state_dict().items()}
    for index, values in optimizer.state_dict()["state"].items():
        state |= {f"{rank}.{index}.{key}": value for key, value in values.items() if key != "step"}
    return state


class OursInTraining(Method):
    """Takes the model and the optimizer themselves."""

    def __init__(self, directory: Path, model: Any, optimizer: Any, here: Place, overlap: bool, fences: Fences) -> None:
        super().__init__(directory, {"model": model, "optimizer": optimizer}, here)
        from resilio_hpc import ckpt

        self.checkpointer = ckpt.Checkpointer(directory, keep_last=2, overlap=overlap)
        fences.watch(self.checkpointer)

    def save(self, step: int) -> Callable[[], None]:
        handle = self.checkpointer.save(step, self.state)
        return lambda: handle.wait("committed", 600)

    def load(self) -> None:
        assert self.checkpointer.restore(self.state) is not None


class BareWrite(Method):
    """What costs a step time although it does nothing for it."""

    def __init__(self, directory: Path, state: dict[str, Any], here: Place) -> None:
        super().__init__(directory, state, here)
        self.writer = BareWriter(directory / f"bytes-{here.rank}", sum(tensor.nbytes for tensor in state.values()))

    def save(self, step: int) -> Callable[[], None]:
        return self.writer.write()

    def load(self) -> None:
        raise NotImplementedError("there is nothing to be loaded")


class CopyAndBareWrite(BareWrite):
    """What it costs at least where nothing is copied beside training."""

    def __init__(self, directory: Path, state: dict[str, Any], here: Place) -> None:
        super().__init__(directory, state, here)
        self.pairs = [(tensor.clone(), tensor) for tensor in state.values()]

    def save(self, step: int) -> Callable[[], None]:
        for copy, tensor in self.pairs:
            copy.copy_(tensor)
        return super().save(step)


def method_of(name: str, directory: Path, model: Any, optimizer: Any, here: Place, fences: Fences) -> Method:
    if name in OURS:
        return OursInTraining(directory, model, optimizer, here, name != "ours", fences)
    limits: dict[str, type[Method]] = dict(zip(LIMITS, (BareWrite, CopyAndBareWrite), strict=True))
    kind = (METHODS | PEERS | limits)[name]
    return kind(directory, tensors_of(model, optimizer, here.rank), here)


def measure(name: str, directory: Path, megabytes: int, pairs: int, steps: int, batch: int) -> dict[str, Any]:
    here = place()
    meet = join(here, name in OTHERS and (METHODS | PEERS)[name].needs_group)
    model, optimizer = model_of(megabytes)
    for _ in range(3):
        step(model, optimizer, batch)
    fences = Fences()
    method = method_of(name, directory, model, optimizer, here, fences)
    number = 0
    found: dict[str, list[float]] = {key: [] for key in ("with", "without", "plain", "draining", "durable", "first")}
    for pair in range(-1, pairs):  # the first one fills arenas and caches
        for saves in (True, False):
            waits: list[tuple[float, Callable[[], None]]] = []
            meet()
            began = time.perf_counter()
            for _ in range(steps):
                at = time.perf_counter()
                step(model, optimizer, batch)
                took = time.perf_counter() - at
                if pair >= 0:
                    found["draining" if waits else "plain"].append(took) if waits or not saves else None
                if saves:
                    number += 1
                    waits.append((time.perf_counter(), method.save(number)))
            block = time.perf_counter() - began
            for at, wait in waits[-1:]:
                wait()
                found["durable" if pair >= 0 else "first"].append(time.perf_counter() - at)
            if method.tidy is not None:
                method.tidy()
            if pair >= 0:
                found["with" if saves else "without"].append(block / steps)
    size = sum(p.nbytes for p in model.parameters()) * 3 / 1e9
    fence = list(fences.waits_s)
    wrong = 0 if name in LIMITS else check(method, model, optimizer, number + 1, batch)
    return {**found, "fence": fence, "gigabytes": size, "wrong": wrong}


def check(method: Method, model: Any, optimizer: Any, number: int, batch: int) -> int:
    """Save once more, train, load: how many tensors are not as they were at the save."""

    def now() -> Fingerprint:
        return fingerprint(tensors_of(model, optimizer, method.place.rank))

    saved = now()
    wait = method.save(number)
    step(model, optimizer, batch)
    wait()
    method.load()
    return differing(saved, now())


def one_run(name: str, options: argparse.Namespace) -> dict[str, Any] | str:
    """All processes of one method; the measurements of the slowest, or why there are none."""
    amounts = {"megabytes": options.megabytes // options.processes}
    amounts |= {"pairs": options.pairs, "steps": options.steps, "batch": options.batch}
    argv = [__file__, "--child", name, "--directory", "{directory}"]
    argv += [part for option, amount in amounts.items() for part in (f"--{option}", str(amount))]
    threads = {"OMP_NUM_THREADS": str(options.threads)}
    results = run(name, argv, options.processes, options.directory, TIMEOUT_S, **threads)
    if isinstance(results, str):
        return results
    slowest = max(results, key=lambda result: sum(result["with"]))
    return {**slowest, "wrong": sum(result["wrong"] for result in results)}


def together(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a method measured in all its rounds."""
    lists = [key for key, value in rounds[0].items() if isinstance(value, list)]
    found = {key: [took for one in rounds for took in one[key]] for key in lists}
    return {**rounds[0], **found, "wrong": sum(one["wrong"] for one in rounds)}


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
        shown(statistics.median(found["first"])),
        str(found["wrong"]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, metavar="N", help="state of all processes (1000)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads that train, per process (1)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="that share the state (1)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="processes of each method (3)")
    parser.add_argument("--pairs", type=int, default=7, metavar="N", help="blocks with saves, and without (7)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="of a block (3)")
    parser.add_argument("--batch", type=int, default=96, metavar="N", help="rows of a step: how long it takes (96)")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="METHOD")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="on the disk to be measured (here)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every timing there")
    parser.add_argument("--child", metavar="METHOD", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        tell_failures()
        tell(measure(options.child, options.directory, options.megabytes, options.pairs, options.steps, options.batch))
    console = Console(width=None if sys.stdout.isatty() else 120)
    title = f"{options.megabytes} MB, {options.processes} process(es) of {options.threads} thread(s): seconds, medians"
    table = Table(title=title, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, no_wrap=True)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in options.only}
    for number in range(options.rounds):
        for name in [*rounds]:
            found = one_run(name, options)
            if isinstance(found, str):
                console.print(f"  {name} is left out: {found}")
                del rounds[name]
            else:
                rounds[name].append(found)
        console.print(f"  round {number + 1} of {options.rounds}")
    results = {name: together(found) for name, found in rounds.items()}
    for name, found in results.items():
        table.add_row(*row(name, found))
    console.print(table)
    if options.json:
        about = {"machine": machine(), "megabytes": options.megabytes, "threads": options.threads}
        options.json.write_text(json.dumps({**about, "processes": options.processes, "results": results}))


if __name__ == "__main__":
    main()
