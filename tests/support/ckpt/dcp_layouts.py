"""Four processes save with torch.distributed.checkpoint and load in other layouts: run by test_dcp_layouts.

argv: a directory. Prints nothing; ends with a traceback for whatever is wrong.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from resilio_hpc.ckpt.dcp.__init__ import ResilioReader, ResilioWriter
from resilio_hpc.ckpt.store import checkpoint_index
from resilio_hpc.ckpt.store.shard_reader import ShardReader
from tests.support.ckpt.dtensor_layouts import (
    RANKS,
    Model,
    check,
    checkpointer,
    everything,
    in_processes,
    made,
    sharded,
    tensor_parallel,
    train,
    whole,
)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """By name, as the states of FSDP and tensor parallelism are saved."""
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments, "epoch": 7}


def written(directory: Path, step: int) -> dict[str, list[int]]:
    """The ranks that wrote each tensor."""
    found: dict[str, list[int]] = {}
    manifest = checkpoint_index.manifest_of(directory, step)
    for rank in range(manifest.world_size):
        shard, record = manifest.shard_of(rank)
        with ShardReader(checkpoint_index.step_directory(directory, step), shard) as reader:
            for tensor in reader.table(record).tensors:
                if tensor.offset >= 0:
                    found.setdefault(tensor.path, []).append(rank)
    return found


def every_layout(rank: int, directory: Path, flat: DeviceMesh, grid: DeviceMesh) -> None:
    layouts: dict[str, Any] = {
        "FSDP": lambda seed: sharded(Model(seed), flat),
        "HSDP": lambda seed: sharded(Model(seed), grid),
        "TP": lambda seed: tensor_parallel(Model(seed), flat),
        "FSDP over TP": lambda seed: sharded(tensor_parallel(Model(seed), grid["model"]), grid["data"]),
    }
    for saving, make in layouts.items():
        model = make(1)
        optimizer = made(model)
        train(model, optimizer, range(3))
        expected = everything(model, optimizer)
        place = directory / saving.replace(" ", "-")
        dcp.save(state_of(model, optimizer), storage_writer=ResilioWriter(place, 3))
        loading: dict[str, Any] = layouts if saving == "FSDP" else {"FSDP": layouts["FSDP"]}
        for name, other in loading.items():
            where = f"{saving} to {name}"
            model = other(2)
            optimizer = made(model)
            state = state_of(model, optimizer)
            dcp.load(state, storage_reader=ResilioReader(place))
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            check(everything(model, optimizer), expected, where)
            assert state["epoch"] == 7
            model = other(3)
            optimizer = made(model)
            state = state_of(model, optimizer)
            restored = checkpointer(place, rank, RANKS).restore(state)
            assert restored is not None
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            check(everything(model, optimizer), expected, f"{where}, by Checkpointer")
        if rank == 0:
            plain = Model(4)
            state = {"model": plain.state_dict()}
            dcp.load(state, storage_reader=ResilioReader(place), no_dist=True)
            check(whole(state["model"]), expected["model"], f"{saving} to one process")
        dist.barrier()


def what_the_checkpointer_saved(rank: int, directory: Path, flat: DeviceMesh) -> None:
    model = sharded(Model(1), flat)
    optimizer = made(model)
    train(model, optimizer, range(3))
    expected = everything(model, optimizer)
    state = {"model": model, "optimizer": state_of(model, optimizer)["optimizer"], "seed": torch.tensor(rank)}
    checkpointer(directory, rank, RANKS).save(5, {**state, "rank": rank, "extra": (torch.ones(2), rank)}).wait(
        "committed", 60
    )
    dist.barrier()
    model = tensor_parallel(Model(2), flat)
    optimizer = made(model)
    state = {**state_of(model, optimizer), "rank": -1, "seed": torch.tensor(-1), "extra": 0}
    del state["epoch"]
    dcp.load(state, storage_reader=ResilioReader(directory))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    check(everything(model, optimizer), expected, "Checkpointer to TP")
    assert (state["rank"], state["seed"], state["extra"][1]) == (rank, rank, rank)  # each its own
    if rank == 0:
        try:
            dcp.load({"seed": torch.tensor(0)}, storage_reader=ResilioReader(directory), no_dist=True)
        except dcp.CheckpointException:
            raise AssertionError("the same number of processes: rank 0 has its own") from None
    dist.barrier()


def optimizers_that_number_their_parameters(rank: int, directory: Path, flat: DeviceMesh) -> None:
    model = sharded(Model(1), flat)
    optimizer = made(model)
    train(model, optimizer, range(2))
    expected = everything(model, optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, storage_writer=ResilioWriter(directory, 1))
    model = sharded(Model(2), flat)
    optimizer = made(model)
    assert checkpointer(directory, rank, RANKS).restore({"model": model, "optimizer": optimizer}) is not None
    check(everything(model, optimizer), expected, "an optimizer object, by Checkpointer")


def other_numbers_of_processes(rank: int, directory: Path, flat: DeviceMesh) -> None:
    value = torch.arange(30.0).reshape(10, 3)
    for size in (2, 3):
        mesh, group = DeviceMesh("cpu", list(range(size))), dist.new_group(list(range(size)))
        place = directory / str(size)
        if rank < size:
            state = {"x": distribute_tensor(value, mesh, [Shard(0)]), "n": torch.tensor(size)}
            dcp.save(state, storage_writer=ResilioWriter(place, 1), process_group=group)
        dist.barrier()
        state = {"x": distribute_tensor(torch.zeros(10, 3), flat, [Shard(1)]), "n": torch.tensor(0)}
        dcp.load(state, storage_reader=ResilioReader(place))
        assert torch.equal(state["x"].full_tensor(), value)
        assert state["n"] == size
        state = {"x": distribute_tensor(value, flat, [Shard(0)])}  # uneven: the last one has one row
        dcp.save(state, storage_writer=ResilioWriter(place, 2))
        if rank < size:
            state = {"x": distribute_tensor(torch.zeros(10, 3), mesh, [Shard(0)])}
            dcp.load(state, storage_reader=ResilioReader(place), process_group=group)
            assert torch.equal(state["x"].full_tensor(), value)
        dist.barrier()


def duplicates_and_empty_plans(rank: int, directory: Path, flat: DeviceMesh) -> None:
    shared = torch.arange(8.0)
    state = {
        "small": distribute_tensor(torch.arange(2.0), flat, [Shard(0)]),  # two processes have nothing
        "copies": distribute_tensor(shared, flat, [Replicate()]),
        "plain": shared + 1,
        "tied": shared,
        "list": [1, torch.ones(2), {"a": 3}],
    }
    dcp.save(state, storage_writer=ResilioWriter(directory, 1))
    found = written(directory, 1)
    assert found.pop("small")
    assert sorted(found) == ["copies", "list/1", "plain", "tied"]
    assert all(len(ranks) == 1 for ranks in found.values()), found
    again = {
        "small": distribute_tensor(torch.zeros(2), flat, [Shard(0)]),
        "copies": torch.zeros(8),
        "plain": distribute_tensor(torch.zeros(8), flat, [Shard(0)]),
        "tied": torch.zeros(8),
        "list": [0, torch.zeros(2), {"a": 0}],
    }
    for number, load in enumerate(
        (
            lambda state: dcp.load(state, storage_reader=ResilioReader(directory)),
            lambda state: checkpointer(directory, rank, RANKS).restore(state),
        )
    ):
        load(again)
        assert torch.equal(again["small"].full_tensor(), torch.arange(2.0))
        assert torch.equal(again["copies"], shared)
        assert torch.equal(again["plain"].full_tensor(), shared + 1)
        assert torch.equal(again["tied"], shared)
        assert torch.equal(again["list"][1], torch.ones(2))
        assert (again["list"][0], again["list"][2]) == (1, {"a": 3}), number
        again["copies"].zero_()
    dcp.save({"one": torch.ones(3)}, storage_writer=ResilioWriter(directory, 2))  # three processes have nothing
    one = {"one": torch.zeros(3)}
    dcp.load(one, storage_reader=ResilioReader(directory))
    assert torch.equal(one["one"], torch.ones(3))


def main(rank: int, directory: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS)
    flat, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    every_layout(rank, directory, flat, grid)
    what_the_checkpointer_saved(rank, directory / "c", flat)
    optimizers_that_number_their_parameters(rank, directory / "o", flat)
    other_numbers_of_processes(rank, directory / "n", flat)
    duplicates_and_empty_plans(rank, directory / "d", flat)
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(in_processes(main, Path(sys.argv[1])))
