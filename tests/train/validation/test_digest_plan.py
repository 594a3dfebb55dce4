"""The parts of a state that are digested one by one: all bytes once, about the same number in each part."""

from __future__ import annotations

import pytest
import torch

from resilio_hpc.train.validation.digest_plan import folded, plan_of, replicated_tensors
from resilio_hpc.train.validation.tensor_digest import size_of


def trained() -> dict[str, object]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.BatchNorm1d(65), torch.nn.Linear(65, 5))
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad])
    model(torch.randn(4, 33)).sum().backward()
    optimizer.step()
    return {"nest": [{"model": model}], "optimizer": optimizer, "number": 3}


@pytest.mark.parametrize("parts", [1, 2, 7, 50, 5000])
def test_all_bytes_are_in_one_part(parts: int) -> None:
    state = trained()
    plan = plan_of(state, parts)
    assert len(plan.parts) == parts
    covered: dict[int, list[tuple[int, int]]] = {}
    for piece in (piece for part in plan.parts for piece in part):
        covered.setdefault(id(piece.tensor), []).append((piece.start, piece.stop))
    found = dict(replicated_tensors(state))
    assert covered.keys() == {id(tensor) for tensor in found.values()}
    for tensor in found.values():
        ends = covered[id(tensor)]
        assert ends[0][0] == 0
        assert ends[-1][1] == size_of(tensor)
        assert [stop for _, stop in ends[:-1]] == [start for start, _ in ends[1:]]
    if parts in (2, 7):
        sizes = [sum(piece.stop - piece.start for piece in part) for part in plan.parts]
        assert max(sizes) < 2 * sum(sizes) / parts


def test_names_are_those_of_the_model_and_frozen_parameters_and_optimizer_states_are_among_them() -> None:
    names = {name for name, _ in replicated_tensors(trained())}
    assert {"0.weight", "2.bias", "exp_avg of 2.bias", "step of 1.weight"} <= names
    assert not any("running" in name or "exp_avg of 0.weight" in name for name in names)


def test_a_shared_parameter_is_digested_once_and_an_optimizer_alone_is_enough() -> None:
    one = torch.nn.Linear(4, 4)
    two = torch.nn.Sequential(one, one)
    assert len(list(replicated_tensors(two))) == 2
    assert len(list(replicated_tensors({"optimizer": torch.optim.SGD(one.parameters())}))) == 2


@pytest.mark.parametrize("of", ["parameter", "optimizer"])
def test_a_flipped_bit_shows_in_its_part_alone(of: str) -> None:
    state = trained()
    plan = plan_of(state, 7)
    before = folded([plan.digest(part) for part in range(7)])
    name = "2.weight" if of == "parameter" else "exp_avg of 2.bias"
    tensor = dict(replicated_tensors(state))[name]
    tensor.detach().view(torch.int32).view(-1)[3] ^= 1 << 7
    after = folded([plan.digest(part) for part in range(7)])
    (part,) = [at for at in range(7) if before[at] != after[at]]
    assert name in {piece.name for piece in plan.parts[part]}


def test_other_tensors_have_another_mark() -> None:
    marks = {plan_of(torch.nn.Linear(4, size), 3).mark for size in (4, 5)}
    marks.add(plan_of(torch.nn.Linear(4, 4).to(torch.bfloat16), 3).mark)
    assert len(marks) == 3
    assert plan_of({}, 3).parts == ((), (), ())


def test_a_plan_is_kept_while_the_tensors_are_the_same() -> None:
    state = trained()
    plan = plan_of(state, 7)
    assert plan_of(state, 7, plan) is plan
    assert plan_of(state, 8, plan) is not plan
    state["optimizer"].state.clear()  # type: ignore[attr-defined]
    assert plan_of(state, 7, plan) is not plan


@pytest.mark.parametrize("how", ["replaced", "resized", "strided"])
def test_memory_that_was_given_back_is_not_read(how: str) -> None:
    model = torch.nn.Linear(64, 64, bias=False)
    plan = plan_of(model, 1)
    before = folded([plan.digest(0)])
    value = model.weight.detach().clone()
    if how == "replaced":
        model.weight.data = value.clone()
    elif how == "strided":
        model.weight.data = value.t().contiguous().t()
    else:
        storage = model.weight.untyped_storage()
        storage.resize_(0)
        storage.resize_(64 * 64 * 4)
        model.weight.data.copy_(value)
    assert folded([plan.digest(0)]) == before
    assert folded([plan_of(model, 1, plan).digest(0)]) == before
