"""What ``exact_reentry.py`` has trained: DDP, FSDP2, HSDP, or data, tensor and pipeline parallel ranks together.

Each rank writes a line for each finished step, and for the one that it has restored: its number, and a digest of all
that the rank holds then (parameters, optimizer, random generator). So a run is compared with an undisturbed one at
every step of every rank. It also writes the times of each entry. Run by the launcher; the mesh of ``dp-tp-pp`` is
(pipeline, data, tensor), 2 each.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer, rng_state, set_rng_state

WIDTH, BATCH, MICRO_BATCHES = 16, 8, 2
AXES = ("pipeline", "data", "tensor")


class Block(nn.Module):
    """A residual block. By tensor parallelism its norm and the second bias are whole on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks, named by their numbers in the whole model."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(first, last)})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Trained(NamedTuple):
    """A rank's ``part`` of the model; ``parallel``: it, as it computes; ``backward``: makes gradients of a batch.

    ``replicas``: the ranks with the same part, where the script has to say so.
    """

    part: nn.Module
    parallel: nn.Module
    backward: Callable[[Tensor, Tensor], None]
    replicas: DeviceMesh | None = None


def make_ddp(run: train.Run, kept: nn.Module) -> Trained:
    parallel = nn.parallel.DistributedDataParallel(kept, init_sync=False)
    return Trained(kept, parallel, lambda x, y: loss_of(parallel(x), y).backward())


def make_sharded(run: train.Run, mesh: DeviceMesh) -> Trained:
    model = Model(0, 4)
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Trained(model, model, lambda x, y: loss_of(model(x), y).backward())


def make_fsdp2(run: train.Run, kept: nn.Module) -> Trained:
    return make_sharded(run, init_device_mesh("cpu", (run.world_size,), mesh_dim_names=("shard",)))


def make_hsdp(run: train.Run, kept: nn.Module) -> Trained:
    shape = (2, run.world_size // 2)
    return make_sharded(run, init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))


def make_3d(run: train.Run, kept: nn.Module) -> Trained:
    mesh = init_device_mesh("cpu", (2, run.world_size // 4, 2), mesh_dim_names=AXES)
    at = mesh["pipeline"].get_local_rank()
    whole = Model(0, 4)
    part = Model(2 * at, 2 * at + 2)
    part.load_state_dict({name: whole.state_dict()[name] for name in part.state_dict()})
    for block in part.blocks.values():
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    stage = PipelineStage(part, at, 2, torch.device("cpu"), group=mesh["pipeline"].get_group())
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=loss_of)
    replicas = mesh["data"].get_group()

    def backward(x: Tensor, y: Tensor) -> None:
        if at == 0:
            schedule.step(x)
        else:
            schedule.step(target=y)
        for parameter in part.parameters():
            dist.all_reduce(local(parameter.grad), group=replicas)

    return Trained(part, part, backward, mesh["data"])


LAYOUTS = {"ddp": make_ddp, "fsdp2": make_fsdp2, "hsdp": make_hsdp, "dp-tp-pp": make_3d}


def local(value: Any) -> Tensor:
    found: Tensor = value.detach().to_local() if isinstance(value, DTensor) else value.detach()
    return found


def data_rank(run: train.Run, layout: str) -> int:
    """Return whose data this rank computes: tensor-parallel ranks, and stages, share a data rank's."""
    return run.rank // 2 % (run.world_size // 4) if layout == "dp-tp-pp" else run.rank


def stage_of(run: train.Run, layout: str) -> str:
    """Return where the state of this rank's stage lies: optimizers of all stages number their parameters from 0."""
    return f"stage{run.rank // (run.world_size // 2)}" if layout == "dp-tp-pp" else "stage0"


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of the rank's own tensors, and its generator's state."""
    found = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    states: dict[int, Any] = optimizer.state_dict()["state"]
    moments = [states[number][name] for number in sorted(states) for name in sorted(states[number])]
    for value in (*model.state_dict().values(), *moments):
        found.update(local(value).contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


class PlantedDeath:
    """A planted death: the rank named in a file dies soon after it has come to a place of its code."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank = path, rank

    def at(self, place: str) -> None:
        """Die after the time that the file tells, if it names this place. A file is used once."""
        try:
            wanted, rank, delay_s = self._path.read_text().split()
            if (wanted, int(rank)) != (place, self._rank):
                return
            self._path.unlink()
        except (OSError, ValueError):
            return
        threading.Thread(target=self._die, args=(float(delay_s),), daemon=True).start()

    def _die(self, delay_s: float) -> None:
        time.sleep(delay_s)
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    options = _options()
    run = train.attach()
    torch.manual_seed(0)
    kept = Model(0, 4) if options.layout == "ddp" else nn.Identity()
    optimizer = torch.optim.AdamW(kept.parameters(), lr=1e-2) if options.layout == "ddp" else None
    checkpoint = Checkpointer(layout=REPLICATED if options.layout == "ddp" else None)
    train.restartable(work)(options, run, checkpoint, kept, optimizer)


def work(
    options: argparse.Namespace, run: train.Run, checkpoint: Checkpointer, kept: nn.Module,
    optimizer: torch.optim.Optimizer | None,
) -> None:  # fmt: skip
    """Train; it is entered again by the ranks that live."""
    strike = PlantedDeath(options.strike, run.rank)
    strike.at("groups")
    times = [time.time()]
    dist.init_process_group("gloo", timeout=run.collective_timeout)
    times.append(time.time())
    torch.manual_seed(0)
    model, parallel, backward, replicas = LAYOUTS[options.layout](run, kept)
    times.append(time.time())
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + data_rank(run, options.layout))

    name = stage_of(run, options.layout)

    def state() -> dict[str, object]:
        return {name: {"model": model, "optimizer": optimizer}, "random": rng_state()}

    strike.at("restore")
    start, found = checkpoint.restore(state()) or (0, None)
    if found is not None:
        set_rng_state(found["random"])
    times.append(time.time())
    if isinstance(parallel, nn.parallel.DistributedDataParallel):
        train.warm_up_ddp(parallel, lambda: loss_of(parallel(torch.ones(BATCH, WIDTH)), torch.ones(1)).backward())
    options.stamps.mkdir(parents=True, exist_ok=True)
    stamps = (options.stamps / f"{run.round}.{run.rank}").open("ab", buffering=0)
    if start > 0:
        stamps.write(f"{start} {digest(model, optimizer)}\n".encode())
    for step in run.steps(start, options.steps, save=checkpoint.saver(state, replicas), every=options.every):
        optimizer.zero_grad()
        backward(torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH))
        ends = torch.tensor([int(options.enough.exists())])
        dist.all_reduce(ends)
        strike.at("optimizer")
        optimizer.step()
        stamps.write(f"{step + 1} {digest(model, optimizer)}\n".encode())
        if step == start:
            entry = options.stamps / f"{run.round}.{run.rank}.entry"
            entry.write_text(" ".join(map(str, (*times, time.time()))))
        strike.at("save")
        time.sleep(options.step_s)
        if ends.item():
            run.step_done(step + 1)
            run.finish(step + 1)
            break
    stamps.close()
    dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", choices=tuple(LAYOUTS), required=True)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--every", type=int, default=40)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--stamps", type=Path, required=True)
    parser.add_argument("--enough", type=Path, required=True, help="end when this file is there")
    parser.add_argument("--strike", type=Path, required=True, help="a file: PLACE RANK SECONDS")
    return parser.parse_args()


if __name__ == "__main__":
    main()
