"""What the tests of other programs' formats share: saving as many processes, exporting, and reading with the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.ckpt.convert.export import Format, export_step, size_in
from resilio_hpc.ckpt.convert.whole_state import WholeState
from resilio_hpc.ckpt.coordination import coordinator
from resilio_hpc.ckpt.coordination.local_coordinator import LocalCoordinator
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.retention import Retention

TARGETS: dict[Format, str] = {"torch": "model.pt", "safetensors": "model.safetensors", "dcp": "model"}
ALL = pytest.mark.parametrize("form", TARGETS)


def rank(directory: Path, number: int, world: int, **more: Any) -> Checkpointer:
    """The Checkpointer of one of ``world`` processes; all of them live in this one."""
    environment = {"RANK": str(number), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": "1"}
    coordinator.use(LocalCoordinator(directory, environment, Retention()))
    try:
        return Checkpointer(directory, **more)
    finally:
        coordinator.use(None)


def save(directory: Path, states: list[Any], layout: Any = None) -> None:
    """Step 1, as so many processes save it."""
    ranks = [rank(directory, number, len(states), layout=layout) for number in range(len(states))]
    for handle in [one.save(1, state) for one, state in zip(ranks, states, strict=True)]:
        handle.wait("committed", 60)


def export(directory: Path, form: Format, rank: int | None = None, name: str = "") -> tuple[Path, list[str]]:
    target = directory.parent / (name or TARGETS[form])
    with WholeState(directory, checkpoint_index.manifest_of(directory, 1), rank) as whole:
        heard: list[int] = []
        notes = export_step(whole, target, form, overwrite=False, progress=heard.append)
        assert sum(heard) == size_in(whole, form)
    return target, notes


def flat(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        yield ".".join(map(str, path)), state
    elif isinstance(state, dict | list | tuple):
        for key, item in state.items() if isinstance(state, dict) else enumerate(state):
            yield from flat(item, (*path, key))


def load(target: Path, form: Format, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors by their names, as the program whose format it is reads them."""
    if form == "torch":
        return dict(flat(torch.load(target, weights_only=True)))
    if form == "safetensors":
        return dict(pytest.importorskip("safetensors.torch").load_file(target))
    wanted = {name: torch.empty_like(tensor, memory_format=torch.contiguous_format) for name, tensor in like.items()}
    dcp.load(wanted, checkpoint_id=target, no_dist=True)
    return wanted


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit."""
    raw = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*raw)


def nothing_but(directory: Path, *names: str) -> bool:
    return {path.name for path in directory.iterdir()} == set(names)


def trained() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(4, 30)).square().sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}
