"""A process that goes on with its state in another round: what is small is put back, and the rest stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from resilio_hpc.ckpt.state import watched
from resilio_hpc.ckpt.state.held_state import HeldState, NotHeld
from resilio_hpc.ckpt.state.put_back import put_back
from resilio_hpc.ckpt.state.slab import Slab


class Loader:
    """Has a state, as a data loader does."""

    def __init__(self) -> None:
        self.position = 0
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "seen": [self.position]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.loads = state["position"], self.loads + 1


class Training:
    """A small training, all of whose parts are in its state."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.loader = Loader()
        self.counts = {"tokens": 0, "names": ["a"], "pair": (0, 1.5)}
        self.array = np.zeros(3)
        self.slab = Slab(torch.zeros(2, 2), (4, 2), (2, 0))

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "loader": self.loader,
            "counts": self.counts, "array": self.array, "random": torch.get_rng_state(), "slab": self.slab,
        }  # fmt: skip

    def begin_step(self) -> None:
        """All that a step does before its optimizer's step."""
        self.optimizer.zero_grad()
        self.model(torch.rand(3, 4)).sum().backward()
        self.loader.position += 1
        self.counts["tokens"] = self.loader.position * 10
        self.counts["names"].append("b")  # type: ignore[attr-defined]
        self.counts["pair"] = (self.loader.position, 2.5)
        self.array += 1
        self.slab.tensor.add_(1)

    def end_step(self) -> None:
        self.optimizer.step()
        self.schedule.step()

    def facts(self) -> list[Any]:
        """All that a restore has to bring back, as plain values."""
        moments = [value.tolist() for one in self.optimizer.state.values() for value in one.values()]
        return [
            [tensor.tolist() for tensor in self.model.state_dict().values()], moments,
            self.optimizer.param_groups[0]["lr"], self.schedule.state_dict()["last_epoch"],
            self.loader.position, self.counts["tokens"],
            list(self.counts["names"]), self.counts["pair"], self.array.tolist(), self.slab.tensor.tolist(),
        ]  # fmt: skip


@pytest.fixture
def training() -> Training:
    made = Training()
    for _ in range(3):
        made.begin_step()
        made.end_step()
    return made


def test_a_step_that_was_begun_leaves_nothing(training: Training) -> None:
    held = HeldState(3, training.state())
    before, random = training.facts(), torch.get_rng_state()
    addresses = [parameter.data_ptr() for parameter in training.model.parameters()]
    training.begin_step()
    training.begin_step()
    assert training.facts() != before
    state = training.state()
    found = put_back(held, state)
    assert found is state
    assert training.facts() == before
    assert found["random"].tolist() == random.tolist() != torch.get_rng_state().tolist()
    assert [parameter.data_ptr() for parameter in training.model.parameters()] == addresses
    assert all(parameter.grad is None for parameter in training.model.parameters())
    assert training.loader.loads == 1


def test_it_trains_on_as_if_nothing_had_been(training: Training) -> None:
    torch.manual_seed(5)
    held = HeldState(3, training.state())
    training.begin_step()
    training.end_step()
    after = training.facts()
    again = Training()
    for _ in range(3):
        again.begin_step()
        again.end_step()
    torch.manual_seed(5)
    held = HeldState(3, again.state())
    again.begin_step()
    torch.set_rng_state(put_back(held, again.state())["random"])
    again.begin_step()
    again.end_step()
    assert again.facts() == after


def test_after_the_optimizers_step_it_is_not_put_back(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "MOST_COPIED", 0)
    held = HeldState(3, training.state())
    training.begin_step()
    training.end_step()
    after = training.facts()
    with pytest.raises(NotHeld):
        put_back(held, training.state())
    assert training.facts() == after, "nothing was changed"


@pytest.mark.parametrize(
    "other",
    [
        {"model": torch.nn.Linear(4, 4)}, {"counts": {"tokens": 0}}, {"array": np.zeros(4)}, {"counts": [1]},
        {"random": torch.zeros(3)},
    ],
)  # fmt: skip
def test_another_state_is_refused_and_stays_as_it_is(training: Training, other: dict[str, Any]) -> None:
    held = HeldState(3, training.state())
    training.begin_step()
    after = training.facts()
    with pytest.raises(NotHeld):
        put_back(held, {**training.state(), **other})
    assert training.facts() == after
    with pytest.raises(NotHeld):
        put_back(held, {key: value for key, value in training.state().items() if key != "array"})
    assert training.facts() == after
