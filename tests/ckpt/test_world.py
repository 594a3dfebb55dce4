"""Which rank a process is: as its libraries say, and refused where they contradict the environment."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from resilio_hpc import train
from resilio_hpc.ckpt import Checkpointer, Slab
from resilio_hpc.ckpt.coordination import world
from resilio_hpc.core.errors import UsageError
from tests.support.ckpt.forked_ranks import in_ranks, join
from tests.support.waiting import PATIENCE_S


def half(rank: int, fill: float) -> Slab:
    return Slab(np.full(500, fill), (1000,), (500 * rank,))


def test_processes_that_no_variable_numbers_save_one_checkpoint_together(tmp_path: Path) -> None:
    """As under torch.multiprocessing.spawn: only the group knows the ranks."""

    def act(rank: int) -> list[Any]:
        early = Checkpointer(tmp_path / "early")
        join(tmp_path, rank, 2)
        checkpoint = Checkpointer(tmp_path / "steps")
        checkpoint.save(1, {"x": half(rank, rank + 1.0), "rank": rank}).wait(timeout_s=PATIENCE_S)
        whole = np.zeros(1000)
        step, state = checkpoint.restore({"x": whole, "rank": -1}) or (0, {})
        with pytest.raises(UsageError, match=f"rank {rank} of 2 in torch.distributed: make the Checkpointer after"):
            early.save(1, {"rank": rank})
        dist.barrier()
        return [step, state["rank"], whole[::499].tolist(), train.attach().rank, checkpoint.place.local_rank]

    assert in_ranks(act, tmp_path) == [[1, rank, [1.0, 1.0, 2.0], rank, rank] for rank in (0, 1)]
    assert sorted(path.name for path in (tmp_path / "steps" / "step-0000000001").iterdir())[1:] == [
        "node-0.h5",
        "node-1.h5",
    ]


def test_an_environment_that_contradicts_the_group_is_refused_in_one_line(tmp_path: Path) -> None:
    def act(rank: int) -> None:
        join(tmp_path, rank, 2)
        Checkpointer(tmp_path / "steps")

    said = in_ranks(act, tmp_path, environment={"RANK": "0", "WORLD_SIZE": "4"})
    assert said[0].startswith("UsageError: WORLD_SIZE=4 in the environment, but this process is rank 0 of 2 in torch")
    assert said[1].startswith("UsageError: RANK=0 in the environment, but this process is rank 1 of 2 in torch")


class Communicator(types.SimpleNamespace):
    """What is asked of mpi4py's."""

    rank, size = 1, 3

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size


def test_mpi_says_the_rank_where_it_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake, since the MPI libraries here give one process a world of its own."""
    communicator = Communicator()
    fake = types.SimpleNamespace(COMM_WORLD=communicator, Is_initialized=lambda: True, Is_finalized=lambda: False)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", fake)
    found = world.find_place({"SLURM_PROCID": "0"})
    assert (found.rank, found.world_size) == (1, 3)
    with pytest.raises(UsageError, match="RANK=2 in the environment, but this process is rank 1 of 3 in MPI"):
        world.find_place({"RANK": "2", "WORLD_SIZE": "3"})
    communicator.size = 1
    found = world.find_place({"RANK": "2", "WORLD_SIZE": "3"})
    assert (found.rank, found.world_size) == (2, 3)
