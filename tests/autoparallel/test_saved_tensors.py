"""What autograd keeps of a traced module, beside what it keeps of the same module with real tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from resilio_hpc.core.errors import UsageError

torch = pytest.importorskip("torch")

from resilio_hpc.autoparallel.model.saved_tensors import kept_bytes, traced_model  # noqa: E402
from tests.support.torch_modules import Skipping, Widening, skipping, widening  # noqa: E402


def really_kept(module: Any, inputs: tuple[Any, ...]) -> int:
    """Return the bytes that autograd keeps of a forward pass with real tensors."""
    there = {one.untyped_storage().data_ptr() for one in [*module.parameters(), *module.buffers(), *inputs]}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(*inputs)
    return sum(storage.nbytes() for address, storage in kept.items() if address not in there)


def twice() -> Any:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = torch.nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            return torch.tanh(self.one(torch.tanh(self.one(x)))).sum()

    return Twice(), (torch.zeros(4, 16),)


@pytest.mark.parametrize("make", [widening, partial(widening, recompute=True), skipping, twice])
def test_as_many_bytes_as_with_real_tensors(make: Callable[[], Any]) -> None:
    module, inputs = make()
    found = kept_bytes(module, inputs, {})
    assert sum(found.values()) == really_kept(module, inputs) > 0


def test_what_a_layer_keeps_is_found_at_the_layer() -> None:
    model = traced_model(widening, "here")
    of = {operator.block: 0 for operator in model.graph.operators}
    for operator, saved in zip(model.graph.operators, model.saved_bytes.tolist(), strict=True):
        of[operator.block] += saved
    layers = [of[f"layers.{i}"] for i in range(8)]
    alone = [layer + 10 * 2 for layer in layers]  # what is rounded down
    wider = 2 * 64 * 2 * (4 * 64 + 2 * 64)  # of one layer over the one before: qkv and its result, MLP before and after
    assert all(later > before for before, later in zip(layers, alone[1:], strict=False))
    assert layers[-1] - layers[0] == pytest.approx(7 * wider, rel=0.2)
    assert (model.samples, model.tokens, model.element_bytes, model.most_stages) == (2, 64, 2, 10)


def test_a_checkpointed_layer_keeps_its_input_alone() -> None:
    every, inputs = widening()
    some, _ = widening(recompute=True)
    assert sum(kept_bytes(some, inputs, {}).values()) < 0.5 * sum(kept_bytes(every, inputs, {}).values())


def test_attention_tells_its_mask_and_the_size_of_its_heads() -> None:
    told = [op for op in traced_model(widening, "here").graph.operators if "attention" in op.name]
    assert len(told) == 8 and {(op.masked, op.head_size) for op in told} == {(True, 64)}


def test_images_are_samples_without_tokens() -> None:
    model = traced_model(skipping, "here")
    assert (model.samples, model.tokens, model.element_bytes) == (4, 0, 4)
    assert model.graph.parameter_count == sum(p.numel() for p in Skipping().parameters())


def test_the_model_stays_as_it_was() -> None:
    module = Widening(2)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    kept_bytes(module, (torch.zeros(1, 8, dtype=torch.long),), {})
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module(torch.zeros(1, 8, dtype=torch.long)).item() > 0


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: (torch.nn.Linear(4, 4), ()), "cannot be traced|none of its inputs"),
        (lambda: (Widening(2), (torch.tensor(3),)), "cannot be traced|none of its inputs"),
    ],
)
def test_inputs_that_are_no_samples_are_refused(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        traced_model(make, "train.py:make")
