"""The place of this process in its run: as torch.distributed or MPI know it, else as the environment says.

Neither library is imported here. Programs that start their processes by themselves (``torch.multiprocessing.spawn``)
give rank and world size to ``init_process_group`` and set no variables.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from resilio_hpc.ckpt.coordination.coordinator import Place
from resilio_hpc.core.errors import UsageError

_SESSION_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
)
_SESSION_KEY = "resilio-session"


class Group(NamedTuple):
    """What a library knows of this process. ``source``: the library's name."""

    source: str
    rank: int
    world_size: int


def group() -> Group | None:
    """Return the default group of torch.distributed, or MPI's world of more than one process; None without either."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return Group("torch.distributed", distributed.get_rank(), distributed.get_world_size())
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() > 1:
        return Group("MPI", mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size())
    return None


def find_place(environment: Mapping[str, str]) -> Place:
    """Return the place of this process. Raises UsageError where $RANK or $WORLD_SIZE contradicts the group."""
    known = group()
    if known is None:
        return Place.read(environment)
    for name, number in (("RANK", known.rank), ("WORLD_SIZE", known.world_size)):
        text = environment.get(name, "")
        if text.isdigit() and int(text) != number:
            raise UsageError(
                f"{name}={text} in the environment, but this process is rank {known.rank} of {known.world_size} in "
                f"{known.source}: remove RANK and WORLD_SIZE from the environment, or make them say the same"
            )
    return place_of(known.rank, known.world_size, environment)


def place_of(rank: int, world_size: int, environment: Mapping[str, str]) -> Place:
    """Return the place of a process whose rank is known; the rest from the environment, where that is of the same rank.

    Else all processes are taken to be on this machine, unless $LOCAL_RANK and $LOCAL_WORLD_SIZE say more: each then
    has a local rank of its own, and leaves cores to the others.
    """
    told = Place.read(environment)
    if (told.rank, told.world_size) == (rank, world_size):
        return told
    local = [environment.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    local_rank, local_world_size = (
        int(text) if text.isdigit() else number for text, number in zip(local, (rank, world_size), strict=True)
    )
    return replace(told, rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=local_world_size)


def check_place(place: Place) -> None:
    """Raise UsageError where the group that exists by now has another place for it."""
    known = group()
    if known is not None and known[1:] != (place.rank, place.world_size):
        raise UsageError(
            f"this Checkpointer is of rank {place.rank} of {place.world_size}, but this process is rank {known.rank} "
            f"of {known.world_size} in {known.source}: make the Checkpointer after that is initialised, and start all "
            "processes of the group in one way"
        )


def session(environment: Mapping[str, str], place: Place) -> str:
    """Return a name that all processes of this start of the run share, and no other start has (as far as known)."""
    if place.world_size == 1:
        return os.urandom(16).hex()
    if named := _named_by_the_store():
        return named
    parts = [environment.get(name, "") for name in _SESSION_VARIABLES]
    if place.local_world_size == place.world_size:  # one node: all have the same parent, torchrun or mpirun
        parts.append(str(os.getppid()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _named_by_the_store() -> str:
    """Return the name that the first process of torch's group chose; it waits for no other process.

    "" without a store.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return ""
    with contextlib.suppress(RuntimeError, AttributeError, NotImplementedError, ValueError):
        store = distributed.distributed_c10d._get_default_store()
        name = store.compare_set(_SESSION_KEY, "", os.urandom(16).hex()).decode("ascii")
        return name if len(name) == 32 else ""
    return ""
