"""A loader goes on with the next batch, whatever its order and its samples are drawn from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from resilio_hpc.ckpt import rng_state, set_rng_state
from resilio_hpc.train import TrackedLoader


class Noisy(Dataset[torch.Tensor]):
    """Each sample is drawn when it is read."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.tensor([float(number), float(torch.rand(()))])


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.rand(2) + number for number in range(12))


def loader(kind: str) -> DataLoader[torch.Tensor]:
    data, words = Noisy(), {"batch_size": 3}
    if kind == "generator":
        return DataLoader(data, **words, shuffle=True, generator=torch.Generator().manual_seed(4))
    if kind == "weighted":
        return DataLoader(data, **words, sampler=WeightedRandomSampler(torch.ones(12).tolist(), 12))
    if kind == "distributed":
        return DataLoader(data, **words, sampler=DistributedSampler(data, num_replicas=2, rank=1))
    if kind == "iterable":
        return DataLoader(Stream(), **words)
    if kind == "no batches":
        return DataLoader(data, batch_size=None, shuffle=True)
    return DataLoader(data, **words, shuffle=True, num_workers=int(kind == "worker"))


class Numbers(Noisy):
    """Samples that are the same each time."""

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.tensor([float(number)])


def persistent(data: Dataset[torch.Tensor]) -> DataLoader[torch.Tensor]:
    return DataLoader(data, batch_size=3, shuffle=True, num_workers=1, persistent_workers=True)


def life(tracked: TrackedLoader, steps: int) -> list[list[float]]:
    """What some steps find; each draws like dropout."""
    batches = tracked.batches()
    found = []
    for _ in range(steps):
        found.append([*next(batches).flatten().tolist(), float(torch.rand(()))])
    return found


def resumed(make: Callable[[], DataLoader[torch.Tensor]], taken: int) -> list[list[float]]:
    """What eleven steps find, the last of them in another life."""
    torch.manual_seed(1)
    first = TrackedLoader(make())
    before = life(first, taken)
    state: Any = copy.deepcopy({"data": first.state_dict(), "random": rng_state()})
    torch.manual_seed(99)
    second = TrackedLoader(make())
    second.load_state_dict(state["data"])
    set_rng_state(state["random"])
    return before + life(second, 11 - taken)


KINDS = ["plain", "generator", "weighted", "distributed", "iterable", "no batches", "worker"]


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_with_the_next_batch(kind: str) -> None:
    """In the midst of an epoch, after its last batch, and in the first of the next."""
    torch.manual_seed(1)
    whole = life(TrackedLoader(loader(kind)), 11)
    for taken in (0, 2, 4, 6) if kind != "worker" else (2, 5):
        assert resumed(lambda: loader(kind), taken) == whole, taken


def test_new_workers_take_the_place_of_those_that_stay_from_epoch_to_epoch() -> None:
    torch.manual_seed(1)
    whole = life(TrackedLoader(persistent(Numbers())), 11)
    for taken in (2, 4, 6, 8):
        assert resumed(lambda: persistent(Numbers()), taken) == whole, taken


def test_samples_that_are_drawn_in_workers_that_stay_go_on_in_the_first_epoch_alone() -> None:
    """torch seeds workers when they begin, and tells nothing of where they are later: a limit of its own."""
    torch.manual_seed(1)
    whole = life(TrackedLoader(persistent(Noisy())), 11)
    assert resumed(lambda: persistent(Noisy()), 2) == whole
    assert resumed(lambda: persistent(Noisy()), 6) != whole


def test_a_state_that_is_taken_before_the_first_batch_is_the_one_that_was_loaded() -> None:
    first = TrackedLoader(loader("plain"))
    life(first, 2)
    state = first.state_dict()
    second = TrackedLoader(loader("plain"))
    second.load_state_dict(copy.deepcopy(state))
    assert second.state_dict()["position"]["taken"] == 2
    assert second.state_dict()["position"]["begun"] == state["position"]["begun"]


def test_a_loader_with_a_state_of_its_own_keeps_its_position() -> None:
    class Own:
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Iterator[int]:
            while self.at < 5:
                self.at += 1
                yield self.at

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    first = TrackedLoader(Own())
    assert next(first.batches()) == 1
    second = TrackedLoader(Own())
    second.load_state_dict(first.state_dict())
    assert list(second) == [2, 3, 4, 5]
