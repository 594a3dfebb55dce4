"""A transformer under FSDP2, in the style of torchtitan: the lines that make it survive failures are marked with `<-`.

    resilio-launch --nproc-per-node 3 examples/train_torchtitan_style.py --steps 40
    torchrun --nproc-per-node 3 examples/train_torchtitan_style.py --steps 40

torchtitan itself needs triton, which torch for the CPU does not have. As there, the states are objects with
state_dict() and load_state_dict(), and torch.distributed.checkpoint saves them; its storage is ours. Gradients are
added up over several micro-batches and scaled. Interrupted or not, it ends with the same bits as long as the number of
ranks stays the same.
"""

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from resilio_hpc import train
from resilio_hpc.ckpt import Checkpointer, rng_state, set_rng_state
from resilio_hpc.ckpt.dcp import ResilioReader, ResilioWriter


class Block(nn.Module):
    """Causal attention, then a feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(functional.scaled_dot_product_attention(query, key, value, is_causal=True))
        return x + functional.dropout(self.down(functional.silu(self.up(self.inner_norm(x)))), 0.1, self.training)


class Transformer(nn.Module):
    """Numbers in, logits of the next one out; both ends have the same weights."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class ModelWrapper:
    """The model, as torch.distributed.checkpoint takes it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state)


class OptimizerWrapper:
    """The optimizer, whose state has the names of parameters."""

    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=self.options)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state, options=self.options)


class TrainState:
    """What each rank has for itself: finished steps, and its generators."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, f"random{dist.get_rank()}": rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        set_rng_state(state[f"random{dist.get_rank()}"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5, help="save a checkpoint every so many steps")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--replicas", type=int, default=1, help="groups of ranks that each hold the whole model (HSDP)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=20)
    parser.add_argument("--overflow-every", type=int, default=7, help="every so many steps a gradient overflows")
    parser.add_argument("--checkpointer", action="store_true", help="save with Checkpointer, not with torch's dcp")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="shortest duration of a step")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    run = train.attach()  # <-
    dist.init_process_group("gloo")
    shape = (args.replicas, run.world_size // args.replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    if args.replicas == 1:
        mesh = mesh["shard"]
    torch.manual_seed(0)
    model = Transformer(50, args.width, args.layers)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(1 + run.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, args.steps)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=5)
    now = TrainState()

    if args.checkpointer:
        checkpoint = Checkpointer(run.checkpoint_dir)  # <-
        whole = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}  # <-
        save: Any = checkpoint.saver(lambda: {**whole, "random": rng_state()})  # <-
        if restored := checkpoint.restore({**whole, "random": rng_state()}):  # <-
            now.step = restored[0]
            set_rng_state(restored[1]["random"])
    else:
        states = {  # <-
            "model": ModelWrapper(model),
            "optimizer": OptimizerWrapper(model, optimizer),
            "schedule": schedule,
            "scaler": scaler,
            "train": now,
        }

        def save(step: int) -> None:  # <-
            now.step = step
            dcp.save(states, storage_writer=ResilioWriter(run.checkpoint_dir, step))

        if Checkpointer(run.checkpoint_dir).steps():  # <-
            dcp.load(states, storage_reader=ResilioReader(run.checkpoint_dir))

    for step in run.steps(now.step, args.steps, save=save, every=args.every):  # <-
        began = time.monotonic()
        for part in range(args.accumulate):
            generator = torch.Generator().manual_seed((step * args.accumulate + part) * run.world_size + run.rank)
            tokens = torch.randint(50, (4, 17), generator=generator).cumsum(1) % 50
            model.set_requires_gradient_sync(part == args.accumulate - 1)
            loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            if step % args.overflow_every == args.overflow_every - 1:
                loss = loss * float("inf")
            scaler.scale(loss / args.accumulate).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
        if run.rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1} loss {loss.item():.4f} scale {scaler.get_scale():g}", flush=True)
        time.sleep(max(0.0, began + args.step_seconds - time.monotonic()))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
