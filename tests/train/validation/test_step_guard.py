"""A guard of one rank without replicas: what it does again, what it saves, and how another job goes on."""

from __future__ import annotations

import math
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from resilio_hpc.ckpt import Checkpointer, rng_state, set_rng_state
from resilio_hpc.core.errors import SuspectResult
from resilio_hpc.train.run import Run
from resilio_hpc.train.validation.step_guard import StepGuard


def lone_run(path: Path) -> Run:
    return Run(0, 1, 0, 0, 0, None, path, False)


class Loader:
    """Gives a number that each step changes."""

    def __init__(self) -> None:
        self.position = 0

    def draw(self) -> int:
        self.position += 1
        return self.position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Training:
    """A small training of one rank; ``faults``: (step, number of the computation) → factor of the loss."""

    def __init__(self, path: Path, faults: dict[tuple[int, int], float] | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.loader = Loader()
        self.faults = faults or {}
        self.tries = 0
        self.checkpoint = Checkpointer(path)
        self.saver = self.checkpoint.saver(self.state)
        if options.pop("saves", False):
            options["save"] = self.saver
        self.guard = StepGuard(lone_run(path), self.model, rewinds=[self.loader], warm_up=5, **options)
        self.step = 0

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model, "optimizer": self.optimizer, "loader": self.loader, "guard": self.guard,
            "random": rng_state(),
        }  # fmt: skip

    def restore(self) -> int:
        self.step, found = self.checkpoint.restore(self.state()) or (0, None)
        if found is not None:
            set_rng_state(found["random"])
        return self.step

    def forward_backward(self, batch: torch.Tensor) -> torch.Tensor:
        self.tries += 1
        self.optimizer.zero_grad()
        loss = self.model(batch * (1 + self.loader.draw() / 100)).square().mean()
        loss = loss * self.faults.get((self.step, self.tries), self.faults.get((self.step, 0), 1.0))
        loss.backward()
        return loss

    def train(self, until: int) -> list[float]:
        losses = []
        while self.step < until:
            self.saver.hold(self.step)  # as run.steps does under the launcher
            self.tries = 0
            losses.append(self.guard.compute(self.step, self.forward_backward, torch.randn(4, 8)).item())
            self.optimizer.step()
            self.step += 1
        return losses

    def sums(self) -> list[float]:
        return [one.detach().double().sum().item() for one in (*self.model.parameters(), *self.model.buffers())] + [
            float(self.loader.position), float(torch.rand(1)),
        ]  # fmt: skip


@pytest.fixture
def usual(tmp_path: Path) -> list[float]:
    """What is there after 12 steps without a fault."""
    training = Training(tmp_path / "usual")
    training.train(12)
    return training.sums()


@pytest.mark.parametrize("factor", [math.nan, math.inf, 1e6])
def test_a_transient_fault_leaves_no_trace(tmp_path: Path, usual: list[float], factor: float) -> None:
    training = Training(tmp_path, {(8, 1): factor})
    training.train(12)
    assert training.sums() == usual
    assert training.guard.counts == {"transient": 1}


def test_what_comes_again_is_unresolved_and_ends_training_where_it_is_not_finite(tmp_path: Path) -> None:
    training = Training(tmp_path, {(8, 0): math.nan})
    with pytest.raises(SuspectResult, match=r"^step 8: loss is NaN \(unresolved\): training does not go on$"):
        training.train(12)
    assert (training.step, training.guard.counts) == (8, {"unresolved": 1})


def test_a_finite_value_that_comes_again_goes_on_unless_it_shall_stop(tmp_path: Path) -> None:
    training = Training(tmp_path / "on", {(8, 0): 1e4})
    training.train(12)
    assert training.guard.counts == {"unresolved": 1}
    with pytest.raises(SuspectResult):
        Training(tmp_path / "stop", {(8, 0): 1e4}, on_deterministic="stop").train(12)


@pytest.mark.parametrize(
    ("again", "moves", "verdict"),
    [
        (1.0, True, "persistent"),
        (1e4, True, "deterministic"),
        (1.0, False, "transient"),
        (1e4, False, "unresolved"),
    ],
)
def test_another_job_goes_on_in_the_midst_of_it(
    tmp_path: Path, usual: list[float], monkeypatch: pytest.MonkeyPatch, again: float, moves: bool, verdict: str
) -> None:
    """``again``: the factor of the loss after the restart; ``moves``: onto another node."""
    first = Training(tmp_path, {(8, 0): 1e4}, saves=True)
    with pytest.raises(SuspectResult, match=r"twice on .*: it is done again after a restart"):
        first.train(12)
    assert first.checkpoint.steps() == [8]
    if moves:
        monkeypatch.setattr(socket, "gethostname", lambda: "another-node")
    torch.manual_seed(99)
    second = Training(tmp_path, {(8, 0): again}, saves=True)
    assert second.restore() == 8
    second.train(12)
    assert second.guard.counts == {verdict: 1}
    assert second.guard.state_dict()["pending"] is None
    if again == 1.0:
        assert second.sums() == usual


def test_the_state_of_a_guard_is_in_the_checkpoint_whether_or_not_something_is_open(tmp_path: Path) -> None:
    first = Training(tmp_path, {(3, 1): math.nan})
    first.train(10)
    first.saver(10).wait("committed")
    second = Training(tmp_path)
    assert second.restore() == 10
    assert second.guard.state_dict() == first.guard.state_dict()
    assert second.guard.counts == {"transient": 1}
    second.faults = {(10, 1): 1e6}  # what was learned is known: the warm-up is over
    second.train(11)
    assert second.guard.counts == {"transient": 2}


def test_sampled_steps_change_nothing_and_tell_how_much_results_differ(
    tmp_path: Path, usual: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(StepGuard, "_tell", lambda self, judgement, about=-1: told.append(judgement))
    training = Training(tmp_path, sample_every=4)
    training.train(12)
    assert training.sums() == usual
    assert [(one.step, one.difference, one.peer_difference) for one in told] == [(0, 0, -1), (4, 0, -1), (8, 0, -1)]
    noisy = Training(tmp_path / "noisy", {(4, 2): 1 + 1e-6}, sample_every=4)
    noisy.train(6)
    assert told[-1].difference == pytest.approx(1e-6, rel=0.2)
    assert noisy.guard.state_dict()["noise"] == told[-1].difference


def test_further_numbers_are_judged(tmp_path: Path) -> None:
    logits = {"attention logit": 5.0}
    training = Training(tmp_path, signals=lambda: logits)
    training.train(8)
    logits["attention logit"] = math.inf
    with pytest.raises(SuspectResult, match="attention logit is infinite"):
        training.train(9)


def test_infinite_gradients_are_the_work_of_a_scaler(tmp_path: Path) -> None:
    class Scaler:
        scale = 1.0

        def get_scale(self) -> float:
            return self.scale

    training = Training(tmp_path, {}, scaler=Scaler())
    hook = training.model[0].weight.register_hook(lambda grad: grad * math.inf if training.step == 3 else grad)
    training.train(3)
    training.guard.compute(3, training.forward_backward, torch.randn(4, 8))
    hook.remove()
    assert training.guard.counts == {}


def test_the_first_module_that_is_not_finite_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(StepGuard, "_tell", lambda self, judgement, about=-1: told.append(judgement))
    training = Training(tmp_path, samples=lambda batch: f"{len(batch)} samples")
    training.train(2)
    with torch.no_grad():
        training.model[1].weight[3] = math.nan
    with pytest.raises(SuspectResult):
        training.train(3)
    assert (told[0].module, told[0].samples, told[0].signal) == ("1 (BatchNorm1d)", "4 samples", "loss is NaN")
