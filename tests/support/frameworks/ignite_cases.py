"""Trainings by an Engine of Ignite in an unusual way: ignite_cases.py CASE ITERATION…, forked from one process.

In "whole" one is undisturbed. In "ITERATION" one ends in the midst of the step after that, and two more begin again
from its checkpoints. "seen" has for each iteration its number, epoch, batch, and a random number; "ended" has how each
one ended.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Engine, Events
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from resilio_hpc.frameworks.ignite import make_resilient

CASE = sys.argv[1]
SAMPLES = torch.arange(20.0)


class Counting(IterableDataset[Any]):
    """Samples that are known only as they come."""

    def __iter__(self) -> Iterator[Any]:
        yield from SAMPLES


def batches(data: Any = None, **words: Any) -> Any:
    """Return a loader of four samples a batch: five batches."""
    return DataLoader(TensorDataset(SAMPLES) if data is None else data, batch_size=4, **words)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "shuffled": (batches(shuffle=True), {"max_epochs": 3}),
    "iterations": (batches(shuffle=True), {"max_iters": 12}),
    "epochs that are longer than the data": (batches(shuffle=True), {"max_epochs": 2, "epoch_length": 7}),
    "epochs that are shorter than the data": (batches(shuffle=True), {"max_epochs": 4, "epoch_length": 3}),
    "a worker": (batches(shuffle=True, num_workers=1), {"max_epochs": 2}),
    "a worker, other epochs": (batches(shuffle=True, num_workers=1), {"max_epochs": 4, "epoch_length": 3}),
    "an unknown length": (batches(Counting()), {"max_epochs": 3}),
    "a list": (list(SAMPLES[:5]), {"max_epochs": 2}),
    "no data": (None, {"max_epochs": 2, "epoch_length": 6}),
    "epochs that are ended": (batches(shuffle=True), {"max_epochs": 4}),
}


def train(last: int) -> None:
    """Train; end in the midst of the step after so many iterations (-1: never)."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(engine: Engine, batch: Any) -> float:
        optimizer.zero_grad()
        loss = model(torch.rand(1, 1)).sum()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    trainer = Engine(step)
    trainer.state_dict_user_keys.append("noted")
    trainer.state.noted = 0
    make_resilient(trainer, {"model": model, "optimizer": optimizer}, every=1)

    @trainer.on(Events.STARTED | Events.EPOCH_STARTED | Events.EPOCH_COMPLETED)
    def draw(engine: Engine) -> None:
        torch.rand(1)

    @trainer.on(Events.ITERATION_COMPLETED)
    def note(engine: Engine) -> None:
        state = engine.state
        state.noted += 1
        if CASE == "epochs that are ended" and state.iteration % 5 == 2:
            engine.terminate_epoch()
        batch = state.batch[0] if isinstance(state.batch, list) else state.batch
        with open("seen", "a") as file:
            print(state.iteration, state.epoch, state.noted, batch, float(torch.rand(1)), file=file)
        if state.iteration == last + 1:
            os._exit(1)

    data, words = CASES[CASE]
    trainer.run(data, **words)
    with open("ended", "a") as file:
        print(trainer.state.iteration, trainer.state.epoch, float(model.weight.detach().sum()), file=file)


def life(folder: str, last: int = -1) -> None:
    """Train in a process of its own, in a folder of its own."""
    pid = os.fork()
    if pid:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code == (0 if last < 0 else 1), f"{folder}: {code}"
        return
    code = 2
    try:
        Path(folder).mkdir(exist_ok=True)
        os.chdir(folder)
        train(last)
        code = 0
    finally:
        if code:
            traceback.print_exc()
        os._exit(code)


def main() -> None:
    """Train undisturbed, and disturbed."""
    torch.set_num_threads(1)
    gc.freeze()
    life("whole")
    for last in sys.argv[2:]:
        life(last, int(last))
        life(last)
        life(last)


if __name__ == "__main__":
    main()
