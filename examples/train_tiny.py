"""The smallest real training job, for measuring recovery: it stamps the time of everything that it does.

The same script runs under torchrun, NVIDIA's ft_launcher, dlrover-run and resilio-launch. Under ours it saves and
restores through resilio_hpc; under the others it does what a careful user of them would: each rank replaces a file of
its own in shared memory.

Each rank appends lines ``what unix_time round`` to ``$OUT/steps-rank<R>`` (or ``--out``), where what is the number of
steps completed or a phase: "start" (first line of this script), "imported", "init" (process group is there), "built"
(model and optimizer), "restored".
"""

import time

STARTED = time.time()  # before the imports: they are part of what a restart costs

import argparse  # noqa: E402
import os  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

IMPORTED = time.time()
BYTES_PER_PARAMETER = 12  # float32 and AdamW's two moments


class Stamps:
    """Appends ``what unix_time round`` lines, each in one write."""

    def __init__(self, directory: Path, rank: int, round_number: int) -> None:
        self._file = (directory / f"steps-rank{rank}").open("ab", buffering=0)
        self._round = round_number

    def write(self, what: str | int, when: float | None = None) -> None:
        self._file.write(f"{what} {when or time.time():.6f} {self._round}\n".encode())


class SharedMemoryFiles:
    """What peers' users do: per-rank torch.save into /dev/shm, atomic rename, the last two steps kept.

    Two, since ranks may die between two saves: they go on from the newest step that all of them have.
    """

    def __init__(
        self, directory: Path, rank: int, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._pattern = f"rank{rank}.step*.pt"
        self._directory, self._rank, self._modules, self._optimizer = directory, rank, modules, optimizer

    def save(self, step: int) -> None:
        older = sorted(self._held().items())[:-1]
        state = {name: module.state_dict() for name, module in self._modules.items()}
        temporary = self._directory / f"rank{self._rank}.tmp"
        torch.save({"optimizer": self._optimizer.state_dict(), **state}, temporary)
        temporary.rename(self._directory / self._pattern.replace("*", str(step)))
        for _, path in older:
            path.unlink()

    def restore(self) -> int:
        held = self._held()
        newest = torch.tensor(max(held, default=0))
        dist.all_reduce(newest, dist.ReduceOp.MIN)
        step = int(newest)
        if step:
            state = torch.load(held[step], mmap=True, weights_only=True)
            for name, module in self._modules.items():
                module.load_state_dict(state[name])  # copies into the tensors that are there
            self._optimizer.load_state_dict(state["optimizer"])
        return step

    def _held(self) -> dict[int, Path]:
        return {int(path.suffixes[0].removeprefix(".step")): path for path in self._directory.glob(self._pattern)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=5, help="save every so many steps")
    parser.add_argument("--step-seconds", type=float, default=0.05, help="shortest duration of a step")
    parser.add_argument("--state-mb", type=float, default=0.0, help="parameters and moments of all ranks together")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--shm", type=Path, default=Path("/dev/shm/train_tiny"), help="checkpoints, unless under ours")
    return parser.parse_args()


def shard(state_mb: float, world_size: int) -> nn.ParameterList:
    """Return this rank's part of a big state, as with a sharded optimizer: no other has it, it is never reduced."""
    count = int(state_mb * 1e6 / BYTES_PER_PARAMETER / world_size)
    part = nn.ParameterList([nn.Parameter(torch.zeros(count))] if count else [])
    for parameter in part:
        parameter.grad = torch.full_like(parameter, 1e-3)
    return part


def steps_with_saves(files: SharedMemoryFiles, start: int, args: argparse.Namespace) -> Iterator[int]:
    """Yield the steps that are left, with a save after every so many."""
    for step in range(start, args.steps):
        yield step
        if (step + 1) % args.every == 0 or step + 1 == args.steps:
            files.save(step + 1)


def main() -> None:
    args = arguments()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    round_number = int(os.environ.get("RESILIO_ROUND") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    stamps = Stamps(args.out, rank, round_number)
    stamps.write("start", STARTED)
    stamps.write("imported", IMPORTED)

    dist.init_process_group("gloo")
    stamps.write("init")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)))
    part = shard(args.state_mb, world_size)
    optimizer = torch.optim.AdamW([*model.parameters(), *part], lr=1e-3, fused=True)

    stamps.write("built")  # the first optimizer of a process imports torch._dynamo: seconds
    modules = {"model": model.module, "part": part}
    if "RESILIO_AGENT_SOCKET" in os.environ:
        from resilio_hpc import train
        from resilio_hpc.ckpt import Checkpointer

        run, checkpoint, state = train.attach(), Checkpointer(), {**modules, "optimizer": optimizer}
        restored = checkpoint.restore(state)
        start = restored[0] if restored else 0
        steps = run.steps(start, args.steps, save=checkpoint.saver(state), every=args.every)
    else:
        files = SharedMemoryFiles(args.shm, rank, modules, optimizer)
        start = files.restore()
        steps = steps_with_saves(files, start, args)
    stamps.write("restored")

    for step in steps:
        began = time.monotonic()
        model.zero_grad()
        model(torch.full((8, 16), float(step))).square().mean().backward()
        optimizer.step()
        stamps.write(step + 1)
        time.sleep(max(0.0, began + args.step_seconds - time.monotonic()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
