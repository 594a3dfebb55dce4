"""Saves at every step beside forward and backward, ranks killed in the middle of copies: the same bits at the end."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import torch

from resilio_hpc.core.ledger import read_ledger
from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S

SCRIPT = """
import os, signal, sys
import torch
import torch.distributed as dist
from resilio_hpc import train
from resilio_hpc.ckpt import Checkpointer

torch.set_num_threads(1)
run = train.attach()
dist.init_process_group("gloo")
torch.manual_seed(run.rank)
model = torch.nn.Linear(800, 800)
optimizer = torch.optim.AdamW(model.parameters())
checkpoint = Checkpointer(run.checkpoint_dir, overlap=True)
state = {"model": model, "optimizer": optimizer}
start, _ = checkpoint.restore(state) or (0, None)

def save(done):
    handle = checkpoint.save(done, state)
    if (done, run.round, run.rank) in ((5, 0, 1), (9, 1, 0)):
        os.kill(os.getpid(), signal.SIGKILL)  # most of the state is not copied yet
    return handle

for step in run.steps(start, 14, save=save, every=1):
    torch.manual_seed(step)
    model(torch.rand(4, 800)).square().mean().backward()
    dist.barrier()  # nobody runs ahead
    optimizer.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), f"{sys.argv[1]}/end{run.rank}.pt")
"""
RANKS = 2


def undisturbed(rank: int) -> str:
    """What the script computes, without any of ours."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(rank)
        model = torch.nn.Linear(800, 800)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(14):
            torch.manual_seed(step)
            model(torch.rand(4, 800)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return fingerprint(model.state_dict())
    finally:
        torch.set_num_threads(threads)


def fingerprint(state: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(name.encode() + value.detach().numpy().tobytes())
    return digest.hexdigest()


def test_ranks_killed_while_copies_wait_end_with_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--standalone", "--run-dir", "run"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", str(RANKS), "train.py", str(tmp_path)],
        cwd=tmp_path,
        env=scrubbed(GLOO_SOCKET_IFNAME="lo"),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    starts = [event.fields["restore"] for event in read_ledger(tmp_path / "run" / "ledger") if event.kind == "start"]
    assert len(starts) == 3
    # the step before, or an older one if the other arena was still being written to disk
    assert starts[1] in [f"memory:{step}" for step in range(1, 6)]
    assert starts[2] in [f"memory:{step}" for step in range(1, 10)]
    for rank in range(RANKS):
        assert fingerprint(torch.load(tmp_path / f"end{rank}.pt")) == undisturbed(rank)
