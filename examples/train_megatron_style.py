"""Tensor, pipeline and data parallel training with plain tensors and a distributed optimizer, as Megatron lays it out.

    resilio-launch --nproc-per-node 4 examples/train_megatron_style.py --tensor 2 --steps 40
    torchrun --nproc-per-node 4 examples/train_megatron_style.py --tensor 2 --pipeline 2 --steps 60

The lines that make it survive failures are marked with `<-`. Each tensor-parallel rank has a part of each matrix, each
pipeline stage some of the layers. Parameters are bfloat16; float32 copies and Adam's moments lie in flat buckets, cut
evenly between the data-parallel ranks. No DTensor tells how they belong together, so the script does, with Slab and
FlatBucket. Most saves are as the buckets lie: cheap, and any number of data-parallel ranks loads them. Each few-th one,
and the last, is by parameter: any layout loads it.

With the same layout it ends with the same bits, interrupted or not. Another pipeline layout sums the same numbers in
the same order, too, and so do one and two data-parallel ranks with --micro-batches 2. Another tensor-parallel layout
rounds otherwise.
"""

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from resilio_hpc import train
from resilio_hpc.ckpt import (
    DP_RESHARDABLE,
    FULLY_RESHARDABLE,
    BucketParameter,
    Checkpointer,
    FlatBucket,
    Slab,
    optimizer_layouts,
)

BUCKET_ELEMENTS = 400  # tiny, so that a process has several
ALIGNED = 64  # places of parameters in a bucket, as Megatron aligns them


class Layout:
    """This rank's place in ranks of tensor × data × pipeline, tensor-parallel neighbours next to each other."""

    def __init__(self, tensor: int, pipeline: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        if world % (tensor * pipeline):
            raise SystemExit(f"{world} ranks are no multiple of --tensor {tensor} × --pipeline {pipeline}")
        data = world // (tensor * pipeline)
        self.tensor_size, self.data_size, self.stages = tensor, data, pipeline
        self.tensor, self.data, self.stage = rank % tensor, rank // tensor % data, rank // (tensor * data)
        grid = torch.arange(world).reshape(pipeline, data, tensor)
        self.tensor_group = self._group(grid.reshape(-1, tensor))
        self.data_group = self._group(grid.transpose(1, 2).reshape(-1, data))
        self.before, self.behind = rank - tensor * data, rank + tensor * data  # in the pipeline
        self.is_first, self.is_last = self.stage == 0, self.stage == pipeline - 1

    @staticmethod
    def _group(rows: torch.Tensor) -> Any:
        groups = [(row, dist.new_group(row)) for row in rows.tolist()]  # all ranks make all groups
        return next(group for row, group in groups if dist.get_rank() in row)


class ToTensorParallel(torch.autograd.Function):
    """In front of a matrix whose rows are shared out: gradients are summed on the way back."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        context.group = group
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=context.group)
        return gradient, None


class FromTensorParallel(torch.autograd.Function):
    """Behind a matrix whose columns are shared out: results are summed on the way there."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class Block(nn.Module):
    """A feed-forward block; this process has some rows of ``up`` and the same columns of ``down``."""

    def __init__(self, number: int, width: int, hidden: int, layout: Layout) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1000 + number)  # the whole matrices are the same in every layout
        up, down = (torch.randn(size, generator=generator) / width for size in ((hidden, width), (width, hidden)))
        self.layout, share = layout, hidden // layout.tensor_size
        first = layout.tensor * share
        self.norm = nn.Parameter(torch.ones(width, dtype=torch.bfloat16))
        self.up = nn.Parameter(up[first : first + share].bfloat16().clone())
        self.down = nn.Parameter(down[:, first : first + share].bfloat16().contiguous())
        self.places = {  # shape of the whole, where this part begins, which copy it is
            "norm": ((width,), (0,), layout.tensor),
            "up": ((hidden, width), (first, 0), 0),
            "down": ((width, hidden), (0, first), 0),
        }

    def forward(self, x: torch.Tensor) -> Any:
        group = self.layout.tensor_group
        inner = ToTensorParallel.apply(functional.rms_norm(x, (x.shape[-1],), self.norm), group)
        return x + FromTensorParallel.apply(functional.gelu(inner @ self.up.T) @ self.down.T, group)


class DistributedOptimizer:
    """AdamW on flat buckets of float32, of which each data-parallel rank has an even share."""

    def __init__(self, blocks: dict[int, Block], layout: Layout) -> None:
        self.layout = layout
        self.parameters: list[list[tuple[nn.Parameter, BucketParameter]]] = [[]]
        end = 0
        for number, block in blocks.items():
            for name, (whole, start, replica) in block.places.items():
                parameter = getattr(block, name)
                if end > BUCKET_ELEMENTS:
                    self.parameters.append([])
                    end = 0
                place = BucketParameter(f"layers.{number}.{name}", end, parameter.shape, whole, start, replica)
                self.parameters[-1].append((parameter, place))
                end += -(-parameter.numel() // ALIGNED) * ALIGNED
        self.shards = [
            nn.Parameter(self._share(self._flat(bucket, lambda p: p.detach()))) for bucket in self.parameters
        ]
        self.adam = torch.optim.AdamW(self.shards, lr=3e-3, foreach=False)
        for shard in self.shards:  # as its first step would make it
            zeros = {name: torch.zeros_like(shard.detach()) for name in ("exp_avg", "exp_avg_sq")}
            self.adam.state[shard] = {"step": torch.tensor(0.0), **zeros}

    def _flat(self, bucket: Any, value: Any) -> torch.Tensor:
        _, last = bucket[-1]
        size = last.first + last.shape.numel()
        flat = torch.zeros(-(-size // self.layout.data_size) * self.layout.data_size)
        for parameter, place in bucket:
            flat[place.first : place.first + parameter.numel()] = value(parameter).flatten().float()
        return flat

    def _share(self, flat: torch.Tensor) -> torch.Tensor:
        share = len(flat) // self.layout.data_size
        return flat[self.layout.data * share :][:share].clone()

    def step(self, gradients: dict[nn.Parameter, torch.Tensor]) -> None:
        for bucket, shard in zip(self.parameters, self.shards, strict=True):
            flat = self._flat(bucket, gradients.__getitem__)
            dist.all_reduce(flat, group=self.layout.data_group)
            shard.grad = self._share(flat)
        self.adam.step()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Give all data-parallel ranks the parameters of all shards."""
        for bucket, shard in zip(self.parameters, self.shards, strict=True):
            parts = [torch.empty_like(shard) for _ in range(self.layout.data_size)]
            dist.all_gather(parts, shard.detach(), group=self.layout.data_group)
            flat = torch.cat(parts)
            for parameter, place in bucket:
                parameter.copy_(flat[place.first :][: parameter.numel()].view_as(parameter))

    def state(self, save: str) -> dict[str, Any]:  # <- what a checkpoint has of it
        buckets = []
        for bucket, shard in zip(self.parameters, self.shards, strict=True):
            moments = self.adam.state[shard]
            tensors = {"master": shard.detach(), "exp_avg": moments["exp_avg"], "exp_avg_sq": moments["exp_avg_sq"]}
            buckets.append(FlatBucket(tensors, self.layout.data * len(shard), [place for _, place in bucket]))
        return {"tensors": optimizer_layouts(buckets, save), "steps": self.adam.state[self.shards[0]]["step"]}

    def restored(self, state: dict[str, Any]) -> None:
        for shard in self.shards:
            self.adam.state[shard]["step"] = state["steps"].clone()


def gradients_of(blocks: dict[int, Block], batch: torch.Tensor, layout: Layout) -> tuple[Any, torch.Tensor]:
    """Return the gradients of this process for its micro-batches [count, rows, width], summed in float32."""
    gradients = {
        parameter: torch.zeros(parameter.shape) for block in blocks.values() for parameter in block.parameters()
    }
    total = torch.zeros(())
    for part in batch:
        if layout.is_first:
            x = part.bfloat16()
        else:
            x = torch.empty(part.shape, dtype=torch.bfloat16)
            dist.recv(x, layout.before)
        entry = y = x.requires_grad_()
        for block in blocks.values():
            y = block(y)
        if layout.is_last:
            loss = (y.float() - part.sin()).square().mean()
            total += loss.detach()
            loss.backward()
        else:
            dist.send(y.detach(), layout.behind)
            gradient = torch.empty_like(y)
            dist.recv(gradient, layout.behind)
            y.backward(gradient)
        if not layout.is_first:
            dist.send(entry.grad, layout.before)
        for parameter, held in gradients.items():
            held += parameter.grad.float()
            parameter.grad = None
    return gradients, total


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline stages")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5, help="save a checkpoint every so many steps")
    parser.add_argument("--full-every", type=int, default=20, help="save one that any layout loads every so many steps")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=24)
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step, over all data-parallel ranks")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="shortest duration of a step")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    run = train.attach()  # <-
    dist.init_process_group("gloo")
    layout = Layout(args.tensor, args.pipeline)
    if args.micro_batches % layout.data_size or args.layers % args.pipeline or args.hidden % args.tensor:
        raise SystemExit("micro-batches, layers and hidden must be multiples of the data, pipeline and tensor ranks")
    checkpoint = Checkpointer(run.checkpoint_dir)  # <- tensors are each rank's own, but for what the state says
    here = range(args.layers)[layout.stage * args.layers // args.pipeline :][: args.layers // args.pipeline]
    blocks = {number: Block(number, args.width, args.hidden, layout) for number in here}
    optimizer = DistributedOptimizer(blocks, layout)
    done = 0

    def state() -> dict[str, Any]:  # <-
        is_full = done % args.full_every == 0 or done == args.steps
        model = {
            f"layers.{number}.{name}": Slab(getattr(block, name).detach(), whole, start, replica or layout.data)
            for number, block in blocks.items()
            for name, (whole, start, replica) in block.places.items()
        }
        return {"model": model, "optimizer": optimizer.state(FULLY_RESHARDABLE if is_full else DP_RESHARDABLE)}

    if restored := checkpoint.restore(state()):  # <- whichever of the two the step has
        done = restored[0]
        optimizer.restored(restored[1]["optimizer"])

    share = args.micro_batches // layout.data_size
    for step in run.steps(done, args.steps, save=checkpoint.saver(state), every=args.every):  # <-
        began = time.monotonic()
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(args.micro_batches, 8, args.width, generator=generator)
        gradients, loss = gradients_of(blocks, batch[layout.data * share :][:share], layout)
        optimizer.step(gradients)
        done = step + 1
        if layout.is_last and layout.tensor == layout.data == 0 and done % 10 == 0:
            print(f"step {done} loss {loss / share:.4f}", flush=True)
        time.sleep(max(0.0, began + args.step_seconds - time.monotonic()))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
