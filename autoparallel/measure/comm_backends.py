"""Collectives for measurements: torch.distributed (gloo, nccl) and MPI. Used inside of a job, one process per rank."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.extras import require
from resilio_hpc.slurm.client.hostlist import expand

BACKENDS = ("gloo", "nccl", "mpi")
TIMEOUT_S = 120.0
_FIRST_PORT, _PORTS = 20_000, 12_000  # below Linux's ephemeral ports


class Backend(Protocol):
    """A backend.

    ``split``: all ranks call it with the same groups; it returns the caller's own group, None without one.
    """

    rank: int
    size: int
    device: str
    version: str

    def hosts(self) -> list[str]:
        """Return the host of every rank."""

    def split(self, groups: Sequence[Sequence[int]]) -> Any:
        """Return the caller's group."""

    def operation(self, collective: str, group: Any, ranks: Sequence[int], size: int) -> Callable[[], None]:
        """Return a call that does it once, with tensors of ``size`` bytes, and returns when it is done.

        Raises NotImplementedError where the backend has no such collective.
        """

    def longest(self, seconds: float) -> float:
        """Return the maximum over all ranks."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def close(self) -> None:
        """End the group."""


def open_backend(name: str) -> Backend:
    """Return the backend of that name. Raises UsageError where it is unknown or not available here."""
    if name not in BACKENDS:
        raise UsageError(f"unknown back end {name!r}: there are {', '.join(BACKENDS)}")
    return MpiBackend() if name == "mpi" else TorchBackend(name)


@dataclass(frozen=True)
class RankAddress:
    """The address of one of torch's ranks: its place, and where rank 0 listens."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int


def place(environment: dict[str, str]) -> RankAddress:
    """Return it from torchrun's variables, or else srun's. Raises UsageError. Pure."""
    try:
        if "MASTER_PORT" in environment:
            rank, size, local = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
            return RankAddress(rank, size, local, environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))
        rank, size, local = (int(environment[f"SLURM_{name}"]) for name in ("PROCID", "NTASKS", "LOCALID"))
        port = _FIRST_PORT + int(environment["SLURM_JOB_ID"]) % _PORTS
        return RankAddress(rank, size, local, expand(environment["SLURM_JOB_NODELIST"])[0], port)
    except KeyError as error:
        raise UsageError(f"{error.args[0]} is not set: this runs under srun, or by resilio plan profile-comm") from None


class TorchBackend:
    """gloo with tensors in memory, nccl with tensors on the GPU of the local rank."""

    def __init__(self, name: str) -> None:
        import torch
        import torch.distributed as dist

        if name == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
            raise UsageError("nccl needs an NVIDIA GPU and a torch that was built with it: --backend gloo runs on CPUs")
        where = place(dict(os.environ))
        self._dist, self._torch = dist, torch
        self._cuda = name == "nccl"
        self._place = "cpu"
        self.device, self.version = "cpu", f"gloo of torch {torch.__version__}"
        if self._cuda:
            torch.cuda.set_device(where.local_rank % torch.cuda.device_count())
            self._place, self.device = "cuda", torch.cuda.get_device_name()
            version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
            self.version = f"nccl {version} of torch {torch.__version__}"
        store = dist.TCPStore(  # type: ignore[attr-defined]
            where.address, where.port, where.size, where.rank == 0, timeout=timedelta(seconds=TIMEOUT_S)
        )
        dist.init_process_group(
            name, store=store, rank=where.rank, world_size=where.size, timeout=timedelta(seconds=TIMEOUT_S)
        )
        self.rank, self.size = where.rank, where.size

    def hosts(self) -> list[str]:
        """Return the host of every rank."""
        found: list[Any] = [None] * self.size
        self._dist.all_gather_object(found, socket.gethostname())
        return [str(host) for host in found]

    def split(self, groups: Sequence[Sequence[int]]) -> Any:
        """Return the caller's group."""
        made = [self._dist.new_group(list(ranks)) for ranks in groups]
        return next((group for group, ranks in zip(made, groups, strict=True) if self.rank in ranks), None)

    def operation(self, collective: str, group: Any, ranks: Sequence[int], size: int) -> Callable[[], None]:
        """See Backend."""
        dist, count = self._dist, max(1, size // 4 // len(ranks))
        whole = self._torch.ones(count * len(ranks), device=self._place)
        part = self._torch.ones(count, device=self._place)
        other = self._torch.empty_like(whole)
        first, second = ranks[0], ranks[-1]
        # torch 2.13 renamed these two
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        calls: dict[str, Callable[[], Any]] = {
            "all-reduce": lambda: dist.all_reduce(whole, group=group),
            "all-gather": lambda: gather(whole, part, group=group),
            "reduce-scatter": lambda: scatter(part, whole, group=group),
            "all-to-all": lambda: dist.all_to_all_single(other, whole, group=group),
            "broadcast": lambda: dist.broadcast(whole, src=first, group=group),
            "send-recv": lambda: (
                dist.send(whole, second, group=group) if self.rank == first else dist.recv(other, first, group=group)
            ),
        }
        call = calls[collective]

        def once() -> None:
            call()
            if self._cuda:
                self._torch.cuda.synchronize()

        try:
            once()
        except RuntimeError as error:
            if "not support" in str(error) or "not implemented" in str(error):
                raise NotImplementedError(str(error)) from error
            raise
        return once

    def longest(self, seconds: float) -> float:
        """Return the maximum over all ranks."""
        value = self._torch.tensor([seconds], dtype=self._torch.float64, device=self._place)
        self._dist.all_reduce(value, op=self._dist.ReduceOp.MAX)
        return float(value.item())

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._dist.barrier()

    def close(self) -> None:
        """End the group."""
        self._dist.destroy_process_group()


class MpiBackend:
    """mpi4py on whatever MPI it was built with, tensors in memory."""

    device = "cpu"

    def __init__(self) -> None:
        require("mpi4py", "--backend mpi")
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise UsageError(f"mpi4py finds no MPI library: {error}") from None
        self._mpi, self._world = MPI, MPI.COMM_WORLD
        self.rank, self.size = self._world.rank, self._world.size
        self.version = MPI.Get_library_version().split(",")[0].split("\n")[0].strip("\0 ")

    def hosts(self) -> list[str]:
        """Return the host of every rank."""
        return list(self._world.allgather(socket.gethostname()))

    def split(self, groups: Sequence[Sequence[int]]) -> Any:
        """Return the caller's group."""
        colour = next((number for number, ranks in enumerate(groups) if self.rank in ranks), self._mpi.UNDEFINED)
        made = self._world.Split(colour, self.rank)
        return None if made == self._mpi.COMM_NULL else made

    def operation(self, collective: str, group: Any, ranks: Sequence[int], size: int) -> Callable[[], None]:
        """See Backend."""
        import numpy as np

        count = max(1, size // 4 // len(ranks))
        whole, part = np.ones(count * len(ranks), dtype=np.float32), np.ones(count, dtype=np.float32)
        other = np.empty_like(whole)
        calls: dict[str, Callable[[], Any]] = {
            "all-reduce": lambda: group.Allreduce(whole, other),
            "all-gather": lambda: group.Allgather(part, whole),
            "reduce-scatter": lambda: group.Reduce_scatter_block(whole, part),
            "all-to-all": lambda: group.Alltoall(whole, other),
            "broadcast": lambda: group.Bcast(whole, 0),
            "send-recv": lambda: group.Send(whole, 1) if group.rank == 0 else group.Recv(other, 0),
        }
        calls[collective]()
        return calls[collective]

    def longest(self, seconds: float) -> float:
        """Return the maximum over all ranks."""
        return float(self._world.allreduce(seconds, op=self._mpi.MAX))

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._world.Barrier()

    def close(self) -> None:
        """Do nothing: MPI ends with the interpreter."""
