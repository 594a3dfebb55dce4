"""Under the real launcher: a lost node that no other one replaces costs the interrupted step, though the world shrinks.

Ranks with the same tensors go on from what is in their own node's memory, with the numbers that they have then.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch

from resilio_hpc.core.ledger import Event, read_ledger
from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S, until

STEPS, STRUCK = 12, 7
SCRIPT = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer

run = train.attach()
checkpoint = Checkpointer(layout=REPLICATED)

@train.restartable
def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"model": model, "optimizer": optimizer, "born": run.rank}
    start, found = checkpoint.restore(state) or (0, state)
    for step in run.steps(start, STEPS, save=checkpoint.saver(state), every=5):
        if step == STRUCK and run.round == 0 and run.rank // 2 == int(sys.argv[1]):
            Path(f"waits{run.rank}").touch()
            time.sleep(600)
        optimizer.zero_grad()
        model(torch.full((1, 8), float(step + run.rank))).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 1000 * run.world_size
        optimizer.step()
        if run.rank == 0:
            print("STEP", step, flush=True)
    print("END", run.rank, run.world_size, found["born"], float(model.weight.detach().sum()), flush=True)

main()
""".replace("STRUCK", str(STRUCK)).replace("STEPS", str(STEPS))


def expected(restored: int) -> float:
    """The weights' sum of four ranks, and of two after the step that was restored."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        world = 4 if step < restored else 2
        optimizer.zero_grad()
        for rank in range(world):
            (model(torch.full((1, 8), float(step + rank))).sum() / (1000 * world)).backward()
        optimizer.step()
    return float(model.weight.detach().sum())


@contextmanager
def launched(path: Path, *argv: str) -> Iterator[subprocess.Popen[str]]:
    (path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--run-dir", "run", "--nnodes", "1:2"]
    command += ["--nproc-per-node", "2", "--heartbeat-timeout", "2", "--no-environment-check", *argv]
    with (path / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=path, env=scrubbed(RESILIO_LOCAL_NODES="2"), text=True, stdout=subprocess.PIPE, stderr=log
        )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


def events(path: Path, kind: str) -> list[Event]:
    ledger = path / "run" / "ledger"
    return [event for event in read_ledger(ledger) if event.kind == kind] if ledger.is_dir() else []


def lose(path: Path, node: int, policy: str) -> tuple[int, list[int], dict[int, list[str]]]:
    """Return the step that a world without that node restores from memory, rank 0's steps, and what ranks had last."""
    with launched(path, "--restart-policy", policy, "train.py", str(node)) as process:
        until(lambda: len(list(path.glob("waits*"))) == 2, "ranks that wait")
        pids = {rank: pid for event in events(path, "ranks") for rank, pid in event.fields["pids"].items()}
        agent = psutil.Process(int(pids[str(2 * node)])).parents()[1]
        frozen = [agent, *agent.children(recursive=True)]  # as a node without power, which answers nothing
        for one in frozen:
            one.suspend()
        until(lambda: len(events(path, "first_step")) > 1, "steps of the smaller world")
        for one in frozen:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        out, _ = process.communicate(timeout=PATIENCE_S)
    log = (path / "log").read_text()
    assert process.returncode == 0, log[-3000:]
    first = events(path, "first_step")[1].fields
    assert first["source"] == "memory", log[-3000:]
    lines = [line.partition("] ")[2].split() for line in out.splitlines()]
    ends = {int(line[1]): line[2:] for line in lines if line[:1] == ["END"]}
    assert [float(end[2]) for end in ends.values()] == [pytest.approx(expected(first["restored"]))] * 2
    return first["restored"], [int(line[1]) for line in lines if line[:1] == ["STEP"]], ends


@pytest.mark.slow
@pytest.mark.parametrize(("node", "policy"), [(0, "in-process"), (1, "in-process"), (1, "all")])
def test_a_node_that_nothing_replaces_costs_the_interrupted_step(tmp_path: Path, node: int, policy: str) -> None:
    """Without an answer of a quorum leases end, and ranks with them; they have saved before."""
    restored, steps, ends = lose(tmp_path, node, policy)
    assert (restored, steps) == (STRUCK, list(range(STEPS)))  # none twice
    born = [rank for rank in range(4) if rank // 2 != node]
    assert {rank: end[:2] for rank, end in ends.items()} == {rank: ["2", str(born[rank])] for rank in range(2)}
