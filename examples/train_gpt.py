"""A small GPT that learns to write Python, byte by byte, from this interpreter's own standard library.

    torchrun --nproc-per-node 2 examples/train_gpt.py --steps 200
    resilio-launch --nproc-per-node 2 examples/train_gpt.py --steps 200

The lines that make it survive failures are marked with `<-`. Interrupted or not, a run ends with the same bits as long
as the number of ranks stays the same; with another number it sees the same data in the same order, but sums in
another order.
"""

import argparse
import hashlib
import json
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer, rng_state, set_rng_state


class Block(nn.Module):
    """One transformer block: causal self-attention, then a feed-forward network."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + functional.dropout(mixed, self.dropout, self.training)
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, layers: int, width: int, length: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, max(1, width // 32), dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(places))))


def batch_of(
    text: torch.Tensor, step: int, args: argparse.Namespace, run: train.Run
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's share of a step's batch, as (input, target), each [batch / ranks, sequence] bytes.

    A pure function of (seed, step, place in the global batch): the step is the whole position in the data, and another
    number of ranks splits the same batches another way.
    """
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - args.sequence, (args.batch,), generator=generator)
    rows = [text[start : start + args.sequence + 1] for start in starts[run.rank :: run.world_size]]
    batch = torch.stack(rows).long()
    return batch[:, :-1], batch[:, 1:]


def standard_library(limit: int = 4_000_000) -> torch.Tensor:
    """Return the sources of Python's standard library, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)[:limit]), dtype=torch.uint8)


def state_hash(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """One SHA-256 over every parameter and every tensor of the optimizer."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        tensors = {"": parameter.detach(), **optimizer.state.get(parameter, {})}
        for key in sorted(tensors):
            digest.update(f"{name}.{key}".encode() + tensors[key].cpu().numpy().tobytes())
    return digest.hexdigest()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="save a checkpoint every so many steps")
    parser.add_argument("--log-every", type=int, default=10, help="print a line every so many steps")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16, help="sequences in the global batch; split over the ranks")
    parser.add_argument("--sequence", type=int, default=128, help="bytes in a sequence")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="shortest duration of a step")
    parser.add_argument("--hash-file", type=Path, help="write the final step, loss and hash here")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)  # one thread per rank: sums are then in the same order on every machine
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)

    run = train.attach()  # <-
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", run.local_rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    if args.batch % run.world_size:
        raise SystemExit(f"--batch {args.batch} cannot be split over {run.world_size} ranks")

    # <- before the model; REPLICATED is for DDP, not for FSDP, ZeRO or experts
    checkpoint = Checkpointer(run.checkpoint_dir, layout=REPLICATED, overlap=True)
    torch.manual_seed(args.seed)  # the same weights everywhere ...
    gpt = GPT(args.layers, args.width, args.sequence).to(device)
    model = DistributedDataParallel(gpt, bucket_cap_mb=1)
    torch.manual_seed(args.seed + 1 + run.rank)  # ... and dropout of its own on each rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=args.steps + 1)
    text = standard_library()

    def loss_of(step: int) -> torch.Tensor:
        tokens, target = (part.to(device) for part in batch_of(text, step, args, run))
        return functional.cross_entropy(model(tokens).flatten(0, 1), target.flatten())

    def state() -> dict[str, object]:
        return {"model": gpt, "optimizer": optimizer, "schedule": schedule, "random": rng_state()}

    start = 0
    if restored := checkpoint.restore(state()):  # <-
        start = restored[0]
        set_rng_state(restored[1]["random"])
    train.warm_up_ddp(model, lambda: loss_of(start).backward())  # <- the same gradient buckets in every life

    for step in run.steps(start, args.steps, save=checkpoint.saver(state), every=args.every):  # <-
        began = time.monotonic()
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if run.rank == 0 and (step + 1) % args.log_every == 0:
            print(f"step {step + 1} loss {loss.item():.4f} lr {schedule.get_last_lr()[0]:.2e}", flush=True)
        time.sleep(max(0.0, began + args.step_seconds - time.monotonic()))

    if run.rank == 0 and args.hash_file:
        result = {"step": args.steps, "loss": loss.item() if start < args.steps else None}
        args.hash_file.write_text(json.dumps({**result, "hash": state_hash(gpt, optimizer)}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
