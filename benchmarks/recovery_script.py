"""The script that benchmarks/recovery.py runs under every launcher: plain PyTorch with a checkpoint of its own.

Each rank appends lines `time event step pid` to $OUT/steps-rank<RANK>; a line is written when the event is over.
"""

import os
import time

RANK = os.environ["RANK"]
STAMPS = os.open(f"{os.environ['OUT']}/steps-rank{RANK}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def stamp(event: str, step: int = 0) -> None:
    """One whole line in one write, so that a reader or a kill never splits it."""
    os.write(STAMPS, f"{time.time():.6f} {event} {step} {os.getpid()}\n".encode())


stamp("started")

import argparse  # noqa: E402  (the time that the imports take is what the stamps measure)
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

stamp("imported")
WIDTH = 1024
BYTES_PER_PARAMETER = 12  # fp32 value and the two moments of Adam


def build(state_mb: int) -> nn.Module:
    """A chain of square layers whose state (parameters and moments) has about this size."""
    layers = state_mb * 2**20 // (BYTES_PER_PARAMETER * WIDTH**2)
    if layers == 0:
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.save(
        {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, path.with_suffix(".tmp")
    )
    path.with_suffix(".tmp").rename(path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state-mb", type=int, default=0, help="size of parameters and moments; 0 is a few layers")
    parser.add_argument("--every", type=int, default=10, help="save a checkpoint every so many steps")
    parser.add_argument("--step-s", type=float, default=0.02, help="the least that a step takes (a GPU's share of it)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = Path(os.environ["OUT"]) / "checkpoint.pt"

    dist.init_process_group("gloo")
    stamp("joined")
    torch.manual_seed(0)
    model = build(args.state_mb)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = load(path, model, optimizer)
    wrapped = DistributedDataParallel(model)
    stamp("restored", step)
    features = next(model.parameters()).shape[1]
    while True:
        time.sleep(args.step_s)
        generator = torch.Generator().manual_seed(step * 1000 + int(RANK))
        x = torch.rand(4, features, generator=generator)
        loss = nn.functional.mse_loss(wrapped(x), x)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        stamp("step", step)
        if step % args.every == 0 and RANK == "0":
            save(path, step, model, optimizer)


if __name__ == "__main__":
    main()
