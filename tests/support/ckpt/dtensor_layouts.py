"""Four processes save a model and its optimizer under FSDP and restore them in other layouts: run by test_dtensors.

argv: a directory. Prints nothing; ends with a traceback for whatever is wrong.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from resilio_hpc.ckpt import Checkpointer
from resilio_hpc.ckpt.coordination import coordinator
from resilio_hpc.ckpt.coordination.local_coordinator import LocalCoordinator
from resilio_hpc.ckpt.restore.committed_source import CommittedSource
from resilio_hpc.ckpt.restore.restore import restore
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.retention import Retention
from resilio_hpc.ckpt.store.view import write_view
from resilio_hpc.core.gloo_groups import keep_alive

RANKS = 4


class Model(torch.nn.Module):
    """Sizes that four processes share evenly, and some that they do not."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = torch.nn.Linear(12, 16)
        self.down = torch.nn.Linear(16, 12, bias=False)
        self.odd = torch.nn.Linear(12, 7)
        self.scale = torch.nn.Parameter(torch.rand(12))

    def forward(self, x: torch.Tensor) -> Any:
        return self.odd(self.scale * self.down(torch.relu(self.up(x))))


def checkpointer(directory: Path, rank: int, world: int) -> Checkpointer:
    environment = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": "1"}
    coordinator.use(LocalCoordinator(directory, environment, Retention()))
    return Checkpointer(directory, overlap=True)


def restored_alone(directory: Path, target: dict[str, Any], rank: int = 0, world: int = 1) -> bool:
    """As one process would restore it that is in no group, or in one of ``world``."""
    (manifest,) = checkpoint_index.committed(directory)
    with (
        ThreadPoolExecutor(1) as pool,
        CommittedSource(
            checkpoint_index.step_directory(directory, manifest.step), manifest, rank, world, "own"
        ) as source,
    ):
        return restore(source, target, pool) is target


def state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer}


def made(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def on_meta() -> Model:
    with torch.device("meta"):
        return Model(3)


def sharded(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(model: Model, mesh: DeviceMesh) -> torch.nn.Module:
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        model(torch.rand(8, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(values: dict[Any, Any]) -> dict[Any, Any]:
    """Every tensor gathered: all processes must come here together."""
    found = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found[name] = whole(value)
        elif isinstance(value, torch.Tensor):
            found[name] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    return found


def everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    return whole({"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]})


def check(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), (where, found.keys(), expected.keys())
        for name, value in expected.items():
            check(found[name], value, f"{where}/{name}")
    else:
        assert torch.equal(found, expected), (where, found, expected)


def check_view(directory: Path, expected: dict[Any, Any]) -> None:
    """Plain h5py sees every tensor in checkpoint.h5, DTensors whole."""
    assert write_view(directory, checkpoint_index.manifest_of(directory, 4)) == []
    with h5py.File(checkpoint_index.step_directory(directory, 4) / "checkpoint.h5") as file:
        seen = {f"model/{name}": value for name, value in expected["model"].items()}
        for number, values in expected["optimizer"].items():
            seen |= {f"optimizer/state/{number}/{name}": value for name, value in values.items()}
        for name, value in seen.items():
            found = file["whole"].get(name)
            found = file[f"rank0/{name}"] if found is None else found  # each rank's own: `step`, and what is no DTensor
            assert torch.equal(torch.from_numpy(numpy.asarray(found[()])), value), name
        assert "whole/model/up.weight" in file


def main(rank: int, directory: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS)
    flat, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))

    model = sharded(Model(1), flat)
    optimizer = made(model)
    train(model, optimizer, range(3))
    saved = checkpointer(directory / "c", rank, RANKS)
    saved.save(3, state(model, optimizer)).wait("committed", 60)
    expected = everything(model, optimizer)
    train(model, optimizer, range(3, 5))
    later = everything(model, optimizer)
    dist.barrier()

    plain = Model(2)
    plain_optimizer = made(plain)
    assert restored_alone(directory / "c", state(plain, plain_optimizer))
    check(everything(plain, plain_optimizer), expected, "one process")
    assert not any(isinstance(value, DTensor) for value in plain.state_dict().values())
    train(plain, plain_optimizer, range(3, 5))
    for name, value in plain.state_dict().items():
        assert torch.allclose(value, later["model"][name], atol=1e-6), name

    layouts: dict[str, Any] = {
        "the same": lambda: sharded(Model(3), flat),
        "HSDP": lambda: sharded(Model(3), grid),
        "TP": lambda: tensor_parallel(Model(3), flat),
        "FSDP on meta": lambda: sharded(on_meta(), flat),
        "HSDP on meta": lambda: sharded(on_meta(), grid),
        "TP on meta": lambda: tensor_parallel(on_meta(), flat),
        "FSDP over TP": lambda: sharded(tensor_parallel(Model(3), grid["model"]), grid["data"]),
    }
    for name, make in layouts.items():
        model = make()
        optimizer = made(model)
        assert checkpointer(directory / "c", rank, RANKS).restore(state(model, optimizer)) is not None
        check(everything(model, optimizer), expected, name)
        again = directory / name.replace(" ", "-")
        checkpointer(again, rank, RANKS).save(4, state(model, optimizer)).wait("committed", 60)
        dist.barrier()
        plain = Model(4)
        plain_optimizer = made(plain)
        assert restored_alone(again, state(plain, plain_optimizer))
        check(everything(plain, plain_optimizer), expected, f"one process from {name}")
        if rank == 0:
            check_view(again, expected)
        dist.barrier()

    value = torch.arange(30.0).reshape(10, 3)
    for size in (2, 3):  # a smaller mesh, whose parts have other sizes; the other processes have none of it
        smaller = DeviceMesh("cpu", list(range(size)))
        parts = {"x": distribute_tensor(value, smaller, [Shard(0)])} if rank < size else {}
        checkpointer(directory / f"v{size}", rank, RANKS).save(1, parts).wait("committed", 60)
        dist.barrier()
        mine = distribute_tensor(torch.zeros(10, 3), flat, [Shard(0)])
        assert checkpointer(directory / f"v{size}", rank, RANKS).restore({"x": mine}) is not None
        assert torch.equal(mine.full_tensor(), value)
    dist.destroy_process_group()


def in_processes(run: Callable[[int, Path], None], directory: Path, ranks: int = RANKS) -> int:
    """Call ``run`` with each rank in a process of its own; 1 if any of them failed."""
    torch.set_num_threads(1)
    keep_alive()
    children = []
    for number in range(ranks):
        child = os.fork()
        if child == 0:
            run(number, directory)
            sys.stdout.flush()
            os._exit(0)
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    return 1 if any(codes) else 0


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(in_processes(main, Path(sys.argv[1])))
