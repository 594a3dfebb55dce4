"""A script whose ranks train as DDP does and are struck, under the real launcher, and what became of it.

Each step's sum over the weights is printed by rank 0: no step comes twice, and the end is that of an undisturbed run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.core.ledger import read_ledger
from tests.support.environments import scrubbed
from tests.support.launch.own_generators import drawn_after
from tests.support.waiting import PATIENCE_S

STEPS, STRUCK = 9, 5
SCRIPT = """
import os, pathlib, signal, socket, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer, rng_state, set_rng_state

WHERE = sys.argv[1]
run = train.attach()
print("BORN", run.rank if "standby" not in WHERE else os.environ["RANK"], os.getpid(), flush=True)

def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), Checkpointer(layout=REPLICATED)

kept = make() if "outside" in WHERE else None

def strike(where, step):
    if where == WHERE.partition(",")[0] and step == STRUCK and run.rank == 1 and run.restart_count == 0:
        if where == "raises":
            raise ValueError("planted")
        if where == "device":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        os.kill(os.getpid(), signal.SIGSTOP if where == "stopped" else signal.SIGKILL)

if "connected" in WHERE:
    listener = socket.create_server(("127.0.0.1", 0))
    both_ends = socket.create_connection(listener.getsockname()), listener.accept()

if "not woken" in WHERE:
    from resilio_hpc.core import gloo_groups
    from resilio_hpc.train import broken_communication
    broken_communication.break_all, gloo_groups.free = lambda environment: None, lambda: 0

@train.restartable
def main():
    if "while it recovers" in WHERE and run.restart_count == 1 and run.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.init_process_group("gloo")
    model, optimizer, checkpoint = kept or make()
    parallel = DistributedDataParallel(model, broadcast_buffers=False)
    torch.manual_seed(run.rank)
    state = lambda: {"model": model, "optimizer": optimizer, "random": rng_state()}
    start, found = checkpoint.restore(state()) or (0, None)
    if found is not None:
        set_rng_state(found["random"])
    print("ENTERS", run.rank, run.round, start, os.getpid(), flush=True)
    hook = optimizer.register_step_post_hook(lambda *_: strike("in the optimizer", step))
    for step in run.steps(start, STEPS, save=checkpoint.saver(state), every=100):
        optimizer.zero_grad()
        for where in ("killed", "raises", "stopped", "device"):
            strike(where, step)
        if "waits" in WHERE and step == STRUCK - 1 and run.restart_count == 0:
            awaited = "process_image" if "image waits" in WHERE else "standby_ready"
            while not any(awaited in path.read_text() for path in (run.run_dir / "ledger").glob("*")):
                time.sleep(0.02)
            if "damaged" in WHERE and run.rank == 0:
                for path in pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[2].glob("images/*/pages-*"):
                    os.truncate(path, 4096)
        if WHERE == "asleep" and step == STRUCK and run.restart_count == 0:
            if run.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)
        if WHERE == "deaf" and step == STRUCK and run.restart_count == 0:
            if run.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                try:
                    time.sleep(1000)
                except BaseException:
                    print("DEAF", flush=True)
        if "not woken" in WHERE:
            dist.all_reduce(torch.zeros(1))
        parallel(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        time.sleep(0.03)
        if run.rank == 0:
            print("STEP", step, float(model[0].weight.detach().sum()), flush=True)
    hook.remove()
    print("END", run.rank, float(torch.rand(1)), float(model[0].weight.detach().sum()), flush=True)
    dist.destroy_process_group()

main()
""".replace("STRUCK", str(STRUCK)).replace("STEPS", str(STEPS))


class ReentryOutcome:
    """What the ranks printed, and what the ledger holds of it."""

    def __init__(self, folder: Path, where: str, *options: str) -> None:
        (folder / "train.py").write_text(SCRIPT)
        argv = ["--run-dir", "run", "--nproc-per-node", "2", "--hang-timeout", "3", *options, "train.py", where]
        done = subprocess.run(
            [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", *argv],
            cwd=folder, env=scrubbed(), capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        self._lines = [line.partition("] ")[2].split() for line in done.stdout.splitlines()]
        self._events = list(read_ledger(folder / "run" / "ledger"))

    def said(self, word: str) -> list[list[str]]:
        return [line[1:] for line in self._lines if line[:1] == [word]]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event.fields for event in self._events if event.kind == kind]

    def processes(self) -> dict[int, list[str]]:
        """By rank: its processes, one for each round that it entered."""
        return {rank: [line[3] for line in self.said("ENTERS") if line[0] == str(rank)] for rank in range(2)}

    def check(self) -> None:
        """Each step was done once, and the ranks ended with the same weights and their own generators."""
        assert [int(line[0]) for line in self.said("STEP")] == list(range(STEPS))
        ends = {int(line[0]): (float(line[1]), line[2]) for line in self.said("END")}
        assert {rank: end[0] for rank, end in ends.items()} == {
            rank: pytest.approx(drawn_after(rank, STEPS)) for rank in range(2)
        }
        assert len({weights for _, weights in ends.values()}) == 1
