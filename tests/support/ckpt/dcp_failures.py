"""Processes that save with torch.distributed.checkpoint while something goes wrong: run by test_dcp_processes.

argv: a directory for each thing that goes wrong, named for it. Prints nothing; the file ``said-<name>`` beside it gets
what its processes say, and ``code-<name>`` how they end.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from resilio_hpc.ckpt.dcp.__init__ import ResilioReader, ResilioWriter
from resilio_hpc.ckpt.store import checkpoint_index
from tests.support.ckpt.dtensor_layouts import in_processes
from tests.support.waiting import PATIENCE_S, until

ROWS = 1 << 20
"""8 MB in all, 2 MB a process."""

LIMIT = timedelta(seconds=60)
STUCK_S = PATIENCE_S / 2
"""A process that takes longer says where it is, and ends."""


class Dying(DefaultSavePlanner):
    """Its process is killed in the middle of its writes."""

    def lookup_object(self, index: Any) -> Any:
        if index.fqn == "last":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().lookup_object(index)


def state(fill: float, ranks: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (ranks,))
    whole = distribute_tensor(torch.arange(ROWS, dtype=torch.float64) + fill, mesh, [Shard(0)])
    return {"whole": whole, "last": torch.tensor(fill)}


def check(directory: Path, fill: float, ranks: int) -> None:
    found = state(-1.0, ranks)
    dcp.load(found, storage_reader=ResilioReader(directory))
    assert isinstance(found["whole"], DTensor)
    assert torch.equal(found["whole"].full_tensor(), torch.arange(ROWS, dtype=torch.float64) + fill)
    assert found["last"] == fill


def fails(directory: Path, fill: float, ranks: int, **options: Any) -> str:
    try:
        dcp.save(state(fill, ranks), storage_writer=ResilioWriter(directory, 2), **options)
    except dcp.CheckpointException as error:
        dist.barrier()
        assert checkpoint_index.committed_steps(directory) == [1]
        return "".join(str(one) for one, _ in error.failures.values())
    raise AssertionError("the save did not fail")


def full_disk(rank: int, directory: Path, ranks: int) -> None:
    """There is room for two steps, and another file takes some of it."""
    ballast = directory / "ballast"
    if rank == 0:
        ballast.write_bytes(bytes(16 << 20))
    dist.barrier()
    why = fails(directory, 2.0, ranks)
    assert "No space left" in why or "no space left" in why, why
    dist.barrier()
    if rank == 0:
        ballast.unlink()
    dist.barrier()


def one_bad_value(rank: int, directory: Path, ranks: int) -> None:
    """One process has something that a checkpoint cannot hold."""

    class OddValue(DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            self.state_dict["odd"] = 1
            return super().create_local_plan()

        def lookup_object(self, index: Any) -> Any:
            return object() if rank == 1 and index.fqn == "odd" else super().lookup_object(index)

    why = fails(directory, 2.0, ranks, planner=OddValue())
    assert "state['odd']: a object (builtins.object) cannot be held" in why, why


def unwritable(rank: int, directory: Path, ranks: int) -> None:
    """One process has another idea of the directory."""
    place = directory if rank != 1 else Path("/proc/nowhere")
    try:
        dcp.save(state(2.0, ranks), storage_writer=ResilioWriter(place, 2))
    except dcp.CheckpointException as error:
        assert list(error.failures) == [1], error
    else:
        raise AssertionError("the save did not fail")
    dist.barrier()


def killed(rank: int, directory: Path, ranks: int) -> None:
    """The last process is killed; the others are told. The next start is without an accident."""
    planner = Dying() if rank == ranks - 1 else DefaultSavePlanner()
    try:
        dcp.save(state(2.0, ranks), storage_writer=ResilioWriter(directory, 2), planner=planner)
    except (RuntimeError, dcp.CheckpointException):
        os._exit(0)
    raise AssertionError("the save did not fail")


def asynchronous(rank: int, directory: Path, ranks: int, kind: AsyncCheckpointerType) -> None:
    for step in (2, 3, 4):
        saved = state(float(step), ranks)
        future = dcp.async_save(
            saved, storage_writer=ResilioWriter(directory, step, keep_last=2), async_checkpointer_type=kind
        )
        saved["whole"].to_local().zero_()  # training goes on
        saved["last"].zero_()
        future.result()
    dist.barrier()
    assert checkpoint_index.committed_steps(directory) == [3, 4]
    check(directory, 4.0, ranks)


def join(what: str, directory: Path, ranks: int, rank: int) -> dist.TCPStore:
    """Make the group of all processes over a store on a port that rank 0 holds.

    The store also serves the processes that save in the background. By default, torch gives them a port that was free
    a moment ago; if another program takes it, one of them waits half an hour for the store.
    """
    place = directory.parent / f"port-{what}-{os.getppid()}"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=LIMIT, wait_for_workers=False)
        place.with_suffix(".part").write_text(str(store.port))
        place.with_suffix(".part").rename(place)
    else:
        until(place.exists, "the store's port", alive=lambda: os.getppid() != 1)
        store = dist.TCPStore("127.0.0.1", int(place.read_text()), timeout=LIMIT)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "DCP_USE_PREFIX_STORE": "1"}
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=LIMIT)
    return store


def main(what: str, directory: Path, ranks: int, rank: int) -> None:
    faulthandler.dump_traceback_later(STUCK_S, exit=True)
    store = join(what, directory, ranks, rank)
    if what == "thread":
        asynchronous(rank, directory, ranks, AsyncCheckpointerType.THREAD)
    elif what == "process":
        asynchronous(rank, directory, ranks, AsyncCheckpointerType.PROCESS)
    else:
        dcp.save(state(1.0, ranks), storage_writer=ResilioWriter(directory, 1))
        check(directory, 1.0, ranks)
        happens = {"disk": full_disk, "value": one_bad_value, "unwritable": unwritable, "killed": killed}
        if what in happens:
            happens[what](rank, directory, ranks)
        again(directory, ranks)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    del store


def again(directory: Path, ranks: int) -> None:
    """The next save of the step that failed, if it did."""
    check(directory, 1.0, ranks)
    dcp.save(state(3.0, ranks), storage_writer=ResilioWriter(directory, 2))
    check(directory, 3.0, ranks)
    dist.barrier()
    assert checkpoint_index.committed_steps(directory) == [1, 2]
    assert not [path for path in directory.iterdir() if path.name.startswith(".")]


def go(what: str, place: Path) -> None:
    """All processes of one thing that goes wrong."""
    ranks = 2 if what == "process" else 4
    with place.with_name(f"said-{what}").open("wb") as said:
        os.dup2(said.fileno(), 2)
    code = in_processes(lambda rank, directory: main(what, directory, ranks, rank), place, ranks)
    place.with_name(f"code-{what}").write_text(str(code))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for place in map(Path, sys.argv[1:]):
        go(place.name, place)
        if place.name == "killed":
            shutil.copytree(place, place.with_name("none"))
            (left,) = place.with_name("none").glob(".staging*")
            (left / "node-9.h5").write_bytes(b"of a larger world that died here")
            go("none", place.with_name("none"))
