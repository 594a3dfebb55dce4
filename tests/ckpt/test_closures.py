"""When an optimizer's step begins that is handed a closure: after its passes, before the first change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from resilio_hpc.ckpt.state import overlap


class Weight:
    """A parameter, what its optimizer did, and when the fence was passed."""

    def __init__(self) -> None:
        self.parameter = torch.nn.Parameter(torch.ones(2))
        self.notes: list[tuple[str, float]] = []
        overlap.fence_before_steps(self)

    def note(self, what: str) -> None:
        self.notes.append((what, float(self.parameter.detach()[0])))

    def fence(self) -> None:
        self.note("fence")

    def closure(self) -> torch.Tensor:
        self.note("passes")
        self.parameter.grad = None
        loss = self.parameter.square().sum()
        loss.backward()
        return loss


@pytest.mark.parametrize("named", [True, False])
def test_the_passes_of_a_closure_are_no_part_of_the_step(named: bool) -> None:
    """PyTorch Lightning hands both passes to ``step``: a peer that is lost in them costs the interrupted step only."""
    weight = Weight()
    optimizer = torch.optim.SGD([weight.parameter], lr=0.25)
    loss = optimizer.step(closure=weight.closure) if named else optimizer.step(weight.closure)
    assert weight.notes == [("passes", 1.0), ("fence", 1.0)]
    assert float(loss.detach()) == 2.0 and float(weight.parameter.detach()[0]) == 0.5
    weight.notes.clear()
    optimizer.step()
    assert weight.notes == [("fence", 0.5)]


def test_a_closure_that_is_called_again_finds_the_fence_passed() -> None:
    weight = Weight()
    torch.optim.LBFGS([weight.parameter], lr=0.1, max_iter=3).step(weight.closure)
    assert [what for what, _ in weight.notes][:2] == ["passes", "fence"]
    before_fence = next(value for what, value in weight.notes if what == "fence")
    assert before_fence == 1.0 and float(weight.parameter.detach()[0]) != 1.0


def test_a_closure_that_fails_has_begun_no_step() -> None:
    weight = Weight()

    def fail() -> Any:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        torch.optim.SGD([weight.parameter], lr=0.1).step(fail)
    assert weight.notes == []


def test_an_optimizer_of_another_kind_may_change_parameters_before_its_closure() -> None:
    class Early(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                weight.parameter.add_(1)
            return super().step(closure)

    weight = Weight()
    Early([weight.parameter], lr=0.1).step(weight.closure)
    assert weight.notes[0] == ("fence", 1.0)
