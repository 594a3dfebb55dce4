"""One process that trains by an Engine of Ignite in an unusual way: ignite_cases.py CASE [ITERATION], ends after that.

It saves each step in "checkpoints", and appends to "seen" what each iteration has had: its number, epoch, batch, and a
random number. A run that is ended, and begun again, has to see what an undisturbed one does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from ignite.engine import Engine, Events
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from resilio_hpc.frameworks.ignite import make_resilient

CASE, LAST = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else -1
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


def main() -> None:
    """Train."""
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
        if state.iteration == LAST + 1:
            os._exit(1)  # in the midst of a step

    data, words = CASES[CASE]
    trainer.run(data, **words)
    print("END", trainer.state.iteration, trainer.state.epoch, float(model.weight.detach().sum()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
