"""A state that is held at a boundary: what it gives later is what was, or it refuses with the place."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resilio_hpc.ckpt import Slab, rng_state
from resilio_hpc.ckpt.format.manifest import Extent, RankTable, TensorRecord
from resilio_hpc.ckpt.format.own_parts import OwnPart, decode_part, filled, with_own
from resilio_hpc.ckpt.state.decoded_tree import decode
from resilio_hpc.ckpt.state.held_state import HeldState, NotHeld
from resilio_hpc.ckpt.state.own_part import own_part
from resilio_hpc.ckpt.state.put_back import put_back
from resilio_hpc.ckpt.state.tree import Flattened, flatten
from resilio_hpc.ckpt.state.watched import MOST_COPIED, Watched
from resilio_hpc.core.errors import CorruptCheckpoint
from tests.support.ckpt.forked_ranks import in_ranks, join

LARGE = MOST_COPIED // 4 + 1000  # floats that are not copied


class Counter:
    """An object with a state of its own, as a loader or a scheduler."""

    def __init__(self) -> None:
        self.seen = [0]

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}  # the list itself, as many do

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Training:
    """A model with running statistics, an optimizer, a schedule, and plain values beside them."""

    def __init__(self, explicit: bool = False) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.counter, self.epoch, self.explicit = Counter(), 0, explicit
        self.notes: dict[str, Any] = {"losses": [1.0], "last": deque([1, 2], 3), "by": defaultdict(list, {"a": [1]})}
        self.work()
        self.optimizer.step()

    def work(self) -> None:
        """Do all of a step but the optimizer's."""
        self.optimizer.zero_grad()
        self.model(torch.rand(8, 4)).sum().backward()
        self.counter.seen[0] += 1
        self.epoch += 1
        self.notes["losses"].append(0.5)
        self.notes["by"]["a"].append(2)

    def state(self) -> dict[str, Any]:
        torchs: list[Any] = [self.model, self.optimizer, self.scheduler]
        if self.explicit:
            torchs = [value.state_dict() for value in torchs]
        return {"torch": torchs, "counter": self.counter, "epoch": self.epoch, "notes": self.notes, "rng": rng_state()}


def content(flat: Flattened) -> tuple[bytes, list[tuple[str, bytes]]]:
    return flat.tree, [(leaf.path, np.asarray(leaf.value).tobytes()) for leaf in flat.leaves]


@pytest.mark.parametrize("explicit", [False, True])
def test_what_is_held_is_what_was(explicit: bool) -> None:
    training = Training(explicit)
    before = content(flatten(training.state()))
    held = HeldState(1, training.state())
    training.work()
    training.scheduler.step()
    for group in training.optimizer.param_groups:
        group["weight_decay"] = 0.5
    assert content(flatten(training.state())) != before
    assert content(held.flattened()) == before
    assert content(held.flattened()) == before  # once more


def test_the_list_of_tensors_is_kept_while_the_objects_are_the_same() -> None:
    training = Training()
    one = HeldState(1, training.state())
    other = HeldState(2, training.state(), one.watched)
    assert other.watched is one.watched
    training.model = torch.nn.Sequential(torch.nn.Linear(4, 8))
    assert HeldState(3, training.state(), one.watched).watched is not one.watched
    fresh = torch.optim.AdamW(training.model.parameters())
    watched = Watched([fresh])
    training.model(torch.rand(2, 4)).sum().backward()
    fresh.step()  # its state comes with its first step
    assert not watched.is_of([fresh])


def changed_in_place(training: Training) -> None:
    with torch.no_grad():
        training.model[0].weight.add_(1)


def replaced(training: Training) -> None:
    training.model[0].weight.data = torch.zeros(8, 4)


def grown(training: Training) -> None:
    training.model.register_buffer("late", torch.zeros(LARGE))


def stepped(training: Training) -> None:
    training.optimizer.step()


@pytest.mark.parametrize("change", [changed_in_place, replaced, grown, stepped])
def test_what_has_changed_is_not_given(change: Callable[[Training], None]) -> None:
    training = Training()
    held = HeldState(1, training.state())
    training.work()
    change(training)
    with pytest.raises(NotHeld):
        held.flattened()


def test_a_learning_rate_that_is_a_tensor_is_held() -> None:
    """Schedules change it in place."""
    training = Training()
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=torch.tensor(0.1), foreach=False)
    rate = training.optimizer.param_groups[0]["lr"]
    held = HeldState(1, training.state())
    rate.fill_(0.5)
    found = {leaf.path: leaf.value for leaf in held.flattened().leaves}
    assert found["torch/1/param_groups/0/lr"].item() == pytest.approx(0.1)
    assert put_back(held, training.state())["torch"][1].param_groups[0]["lr"].item() == pytest.approx(0.1)


def test_an_optimizer_that_makes_other_tensors_in_each_step_is_held() -> None:
    training, held = Training(), None
    training.optimizer = torch.optim.LBFGS(training.model.parameters(), history_size=2, max_iter=2)

    def closure() -> torch.Tensor:
        training.optimizer.zero_grad()
        loss = training.model(torch.rand(8, 4)).square().sum()
        loss.backward()
        return loss

    for step in range(4):
        training.optimizer.step(closure)
        held = HeldState(step, training.state(), None if held is None else held.watched)
        assert content(held.flattened()) == content(flatten(training.state()))
    training.optimizer.step(closure)
    with pytest.raises(NotHeld):
        held.flattened()


def test_a_group_that_was_added_meanwhile_is_told() -> None:
    training = Training()
    held = HeldState(1, training.state())
    training.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    with pytest.raises(NotHeld, match="other groups"):
        held.flattened()


def test_a_stream_is_held_as_it_was() -> None:
    stream = BytesIO(b"abc")
    stream.seek(1)
    held = HeldState(1, {"log": stream})
    stream.write(b"xyz")
    assert held.flattened().tree == flatten({"log": held.state["log"]}).tree
    assert (held.state["log"].getvalue(), held.state["log"].tell()) == (b"abc", 1)


def test_a_large_tensor_beside_torchs_objects_must_not_change() -> None:
    ema = torch.zeros(LARGE)
    held = HeldState(1, {"ema": ema, "part": Slab(torch.ones(LARGE), (2 * LARGE,), (0,))})
    assert held.flattened().leaves[0].value.data_ptr() == ema.data_ptr()
    ema.add_(1)
    with pytest.raises(NotHeld, match="ema was changed"):
        held.flattened()


def test_arrays_are_copied_up_to_a_limit() -> None:
    grid = np.arange(10.0)
    held = HeldState(1, {"grid": grid, "part": Slab(grid, (20,), (10,))})
    grid += 1
    first, part = (leaf.value for leaf in held.flattened().leaves)
    assert first.tolist() == part.tolist() == list(range(10))
    with pytest.raises(NotHeld, match="grid is an array"):
        HeldState(1, {"grid": np.zeros(MOST_COPIED // 8 + 1)})


def test_tied_weights_stay_one() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert len(HeldState(1, {"model": model, "first": model[0].weight}).flattened().leaves) == 1


# -- outlines ------------------------------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.builds(lambda n: torch.arange(n), st.integers(0, 4)) | st.builds(lambda: Training().model),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    | st.tuples(inner, inner) | st.dictionaries(st.integers(), inner, max_size=3).map(OrderedDict),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=40)
@given(values)
def test_an_outline_and_the_whole_tree_give_the_tree(state: Any) -> None:
    whole = flatten(state).tree
    assert filled(decode_part(own_part(state)).outline, whole) == whole


def test_what_is_a_ranks_own_comes_from_its_outline() -> None:
    one, other = Training(), Training()
    other.epoch, other.counter.seen = 99, [7]
    made = filled(decode_part(own_part(one.state())).outline, flatten(other.state()).tree)
    assert made == flatten(one.state()).tree


def test_small_tensors_outside_of_torchs_objects_are_a_ranks_own() -> None:
    weight = torch.ones(300)
    state = {"model": Training().model, "generator": torch.get_rng_state(), "mean": np.ones((2, 3), np.float32),
             "large": torch.zeros(1 << 16), "none": torch.zeros(0), "w": weight, "same": weight}  # fmt: skip
    part = decode_part(own_part(state))
    assert [tensor.path for tensor in part.tensors] == ["generator", "mean", "w", "same"]
    assert part.tensors[0].data == torch.get_rng_state().numpy().tobytes()
    table = RankTable(Extent(0, 0, 0), tuple(
        TensorRecord(leaf.path, leaf.kind, leaf.dtype, leaf.shape, 0, leaf.size_bytes, (7,) * bool(leaf.size_bytes))
        for leaf in flatten(state).leaves
    ))  # fmt: skip
    records, data = with_own(table, part, 128)
    moved = {record.path: record for record in records if record.offset}
    assert sorted(moved) == ["generator", "mean", "w"]
    assert all(record.offset % 64 == 0 and record.checksums != (7,) for record in moved.values())
    assert data[moved["w"].offset - 128 :][:1200] == weight.numpy().tobytes()
    other = msgspec.structs.replace(part.tensors[0], shape=(4, 4))
    with pytest.raises(CorruptCheckpoint, match="generator: this rank's tensor is another one"):
        with_own(table, OwnPart(b"", (other,)), 128)
    with pytest.raises(CorruptCheckpoint, match="cannot be read"):
        decode_part(b"\x92\xc4")


def test_trees_of_another_shape_are_refused() -> None:
    tensor = torch.ones(2)
    for mine, others in (
        ({"a": tensor}, {"b": tensor}), ([tensor], [tensor, tensor]), ({"a": [tensor]}, {"a": tensor}),
        ([tensor], {"0": tensor}),
    ):  # fmt: skip
        with pytest.raises(CorruptCheckpoint, match="another shape"):
            filled(decode_part(own_part(mine)).outline, flatten(others).tree)
    with pytest.raises(CorruptCheckpoint, match="cannot be read"):
        filled(b'{"a":', b"{}")


def _sharded(room: Path, rank: int) -> dict[str, Any]:
    """Hold the state of an FSDP2 model, and look at it in the midst of a step and behind it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    join(room, rank, 2)
    mesh = init_device_mesh("cpu", (2,))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}

    def local(flat: Flattened) -> list[torch.Tensor]:
        values = [leaf.value for leaf in flat.leaves]
        return [value.to_local() if hasattr(value, "to_local") else value for value in values]

    model(torch.rand(4, 8)).sum().backward()
    optimizer.step()
    before = [value.clone() for value in local(flatten(state))]
    held = HeldState(1, state)
    loss = model(torch.rand(4, 8)).sum()  # its parameters are gathered
    found = [value.clone() for value in local(held.flattened())]
    loss.backward()
    optimizer.step()
    try:
        held.flattened()
        refused = ""
    except NotHeld as error:
        refused = str(error)
    return {"same": all(map(torch.equal, before, found)), "tensors": len(found), "refused": refused}


def test_a_sharded_model_is_held_while_its_parameters_are_gathered(tmp_path: Path) -> None:
    for said in in_ranks(lambda rank: _sharded(tmp_path, rank), tmp_path):
        assert (said["same"], said["tensors"]) == (True, 4 + 3 * 4)
        assert "was changed" in said["refused"]


def test_a_scaler_is_as_it_was_where_it_has_left_a_step_out() -> None:
    """A gradient overflows: no step of the optimizer tells that the boundary is over, and the scale is halved."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    state = {"model": model, "optimizer": optimizer, "scaler": scaler}

    def step(factor: float) -> None:
        scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    step(1.0)
    then = scaler.state_dict()
    held = HeldState(1, state)
    step(float("inf"))
    assert (then["scale"], scaler.get_scale()) == (8.0, 4.0)
    assert decode(held.flattened().tree)["scaler"] == then
    assert held.with_live(state, None)["scaler"] == then
    assert put_back(held, state) is state and scaler.state_dict() == then
    step(1.0)
    assert scaler.get_scale() == 16.0  # the second good step in a row
