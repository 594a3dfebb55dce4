"""Three processes save a model under FSDP1; two or three restore it, wrapped otherwise: run by test_fsdp1.

argv: a directory. Prints nothing; ends with a traceback for whatever is wrong.
"""

from __future__ import annotations

import copy
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import CustomPolicy

from resilio_hpc.ckpt import audit, fsdp_state, rng_state
from resilio_hpc.ckpt.state.held_state import HeldState
from resilio_hpc.ckpt.state.module_names import fsdp_modules
from resilio_hpc.ckpt.state.put_back import put_back
from resilio_hpc.core.errors import LayoutMismatch, UsageError
from tests.support.ckpt.dtensor_layouts import check, checkpointer, in_processes, restored_alone

RANKS = 3


class Block(nn.Module):
    """Sizes that three processes do not share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """With tied weights, a buffer, and a block that is not trained."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, 5)
        self.first, self.frozen, self.last = Block(), Block(), Block()
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(3) + seed)
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.last(self.frozen(self.first(self.embedding(tokens)))))


class Layout(NamedTuple):
    """How a model is wrapped. ``wrapped``: kinds of modules with a flat parameter of their own."""

    original: bool
    wrapped: tuple[type[nn.Module], ...] = (Block,)
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    low: bool = False
    adam: type[torch.optim.Optimizer] = torch.optim.AdamW


LAYOUTS = [
    Layout(False),
    Layout(True),
    Layout(True, ()),  # all in one
    Layout(False, (nn.Linear, Block)),
    Layout(True, (nn.Linear,), ShardingStrategy.SHARD_GRAD_OP, True),
    Layout(False, (Block,), ShardingStrategy.NO_SHARD),
]


class Training:
    """A model and its optimizer in a layout, over some processes."""

    def __init__(self, layout: Layout, group: Any, seed: int) -> None:
        model = Model(seed)
        tied = {id(model.head)}
        policy = CustomPolicy(lambda module: isinstance(module, layout.wrapped) and id(module) not in tied)
        precision = MixedPrecision(param_dtype=torch.bfloat16) if layout.low else None
        self.model = FSDP(
            model, group, layout.strategy, auto_wrap_policy=policy, use_orig_params=layout.original,
            device_id=torch.device("cpu"), mixed_precision=precision,
        )  # fmt: skip
        self.optimizer = layout.adam(self.model.parameters(), lr=0.01)
        self.group = group

    def train(self, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            tokens = torch.randint(11, (6 * 8,))[dist.get_rank(self.group) :: dist.get_world_size(self.group)]
            self.model(tokens).float().square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"training": fsdp_state(self.model, self.optimizer), "random": rng_state()}

    def everything(self) -> dict[str, Any]:
        return gathered(self.model, self.optimizer, self.group)


def gathered(model: Any, optimizer: Any, group: Any = None) -> dict[str, Any]:
    """As torch gathers it. One kind of state after another: torch 2.13 has one buffer on the CPU for all kinds."""
    with warnings.catch_warnings(), FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        warnings.simplefilter("ignore")
        found: dict[str, Any] = {}
        for key in ("step", "exp_avg", "exp_avg_sq"):
            own = optimizer.state_dict()
            own["state"] = {number: {key: value[key]} for number, value in own["state"].items()}
            whole = FSDP.optim_state_dict(model, optimizer, own, group)
            for name, values in copy.deepcopy(whole["state"]).items():
                found.setdefault(name, {}).update(values)
        return {"model": copy.deepcopy(model.state_dict()), "optimizer": found}


def main(rank: int, directory: Path) -> None:
    warnings.simplefilter("ignore")
    limit = timedelta(seconds=60)  # for the others, where one fails
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS, timeout=limit)
    three, two = dist.new_group([0, 1, 2]), dist.new_group([0, 1])
    only = Training(LAYOUTS[0], three, 1)
    only.train(range(1))
    assert (said := audit(only.state)) == [], said
    said = audit({"random": rng_state(), "training": fsdp_state(only.model)})
    assert any(line.startswith("optimizer AdamW") for line in said), said
    for number, layout in enumerate(LAYOUTS):
        every_layout(directory / f"saved{number}", rank, layout, three, two)
    for layout in LAYOUTS[:2]:
        held(three, layout)
    edges(directory / "edges", rank, three)
    dist.destroy_process_group()


def every_layout(directory: Path, rank: int, layout: Layout, three: Any, two: Any) -> None:
    saved = Training(layout, three, 1)
    saved.train(range(3))
    checkpointer(directory, rank, RANKS).save(3, saved.state()).wait("committed", 60)
    expected = saved.everything()
    assert "head.weight" in expected["model"] and "first.up.weight" in expected["optimizer"]
    dist.barrier()
    for other in LAYOUTS:
        for group, size in ((three, 3), (two, 2)):
            if rank >= size:
                continue
            made = Training(other, group, 2)
            if other is LAYOUTS[0]:
                made.train(range(1))  # over state that is there
            target = made.state()
            assert restored_alone(directory, target, rank, size)
            assert target["training"]["buffers"]["seen"].tolist() == [1.0] * 3
            check(made.everything(), expected, f"{layout} as {other} by {size}")
            made.train(range(3, 5))
            if other == layout and size == 3:
                again = made.everything()
    saved.train(range(3, 5))
    check(again, saved.everything(), f"trained on: {layout}")
    dist.barrier()
    if rank == 0:
        plain = Model(3)
        parameters = dict(plain.named_parameters(remove_duplicate=False))
        assert restored_alone(directory, {"training": {"parameters": parameters}})
        for name, value in parameters.items():
            assert torch.equal(value, expected["model"][name]), name
    dist.barrier()


def held(three: Any, layout: Layout) -> None:
    """The last finished step can be saved, or brought back, up to the next step of the optimizer."""
    made = Training(layout, three, 1)
    made.train(range(2))
    before, state = made.everything(), made.state()
    at_boundary = HeldState(2, state)
    assert at_boundary.flattened().leaves
    with torch.no_grad():
        for _, module in fsdp_modules(made.model):
            module._handle.flat_param += 1
    put_back(at_boundary, made.state())
    check(made.everything(), before, f"put back: {layout}")


def edges(directory: Path, rank: int, three: Any) -> None:
    """What cannot be saved is refused by name."""
    made = Training(Layout(False, adam=torch.optim.SGD), three, 1)
    refused(lambda: checkpointer(directory, rank, RANKS).save(1, {"model": made.model}), "ckpt.fsdp_state")
    refused(lambda: fsdp_state(nn.Linear(2, 2)), "no module of the model")
    strange = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    refused(lambda: fsdp_state(made.model, strange), "parameters that are not the model's")
    with FSDP.summon_full_params(made.model):
        refused(lambda: fsdp_state(made.model), "between two steps")
    factored = torch.optim.Adafactor(made.model.parameters())
    factored.state[next(made.model.parameters())] = {"row": torch.zeros(2, 2)}
    refused(lambda: fsdp_state(made.model, factored)["optimizers"][0].state_dict(), "cannot be cut otherwise")
    # a block that was frozen is trained now, flattened with one that was trained
    checkpointer(directory, rank, RANKS).save(1, {"training": fsdp_state(made.model)}).wait("committed", 60)
    dist.barrier()
    half = Training(Layout(False), three, 1)
    half.train(range(1))
    checkpointer(directory, rank, RANKS).save(2, half.state()).wait("committed", 60)
    dist.barrier()
    model = Model(2)
    model.requires_grad_(True)
    whole = FSDP(model, three, device_id=torch.device("cpu"))
    state = fsdp_state(whole, torch.optim.AdamW(whole.parameters()))
    before = whole._handle.flat_param.detach().clone()
    try:
        checkpointer(directory, rank, RANKS).restore({"training": state, "random": None})
    except LayoutMismatch as error:
        assert "frozen" in str(error) and "flattened with" in str(error), error
    else:
        raise AssertionError("restored")
    assert torch.equal(before, whole._handle.flat_param)
    dist.barrier()


def refused(call: Any, words: str) -> None:
    try:
        call()
    except UsageError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


if __name__ == "__main__":
    sys.exit(in_processes(main, Path(sys.argv[1]), RANKS))
